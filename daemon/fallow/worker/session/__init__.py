"""The conversation with the head, through the node's agent.

`session` ties the parts together. `orders` obeys the newest order, `groups` holds process groups, `news` is what the
head says of the run, `status` what this worker says of itself. `ends` has the reasons for which a wait for the next
generation is over for good.
"""
