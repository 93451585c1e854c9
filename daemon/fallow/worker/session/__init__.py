"""The conversation with the head, through the node's agent.

`session` ties the parts together. `orders` obeys the newest order, `news` is what the head says of the run, `status`
what this worker says of itself.
"""
