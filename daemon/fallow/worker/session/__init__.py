"""The conversation with the head, through the node's agent.

`session` ties the parts together. `orders` obeys the newest order, `head_status` holds what the head last
said of the run, and `status` holds what this worker reports of itself.
"""
