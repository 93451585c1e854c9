"""The conversation with the head, through the node's agent.

`session` ties the parts together. `orders` obeys the newest order, `groups` holds process groups, `gathering` is how
members meet, `news` is what the head says of the run. What this worker says of itself: `statement` (facts that stay)
and `progress`. `passage` is the wait for the next generation, `ends` why such a wait is over for good.
"""
