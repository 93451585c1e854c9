"""Decides which idle nodes to ask for, which requests to withdraw and which nodes to give back. Pure.

Input: one `Situation`, made of a poll, what each run could use (`Demand`), our allocations, the rules and what the head
has learned (`Knowledge`). Output: one `Plan`, with a reason for every idle node that stays unused, and with the updated
knowledge. Begin with `plan`. `share` decides how many nodes each run gets, `situation` which nodes a run can use,
`requests` how many requests may be made and of which shape, `withdrawals` which requests are cancelled.
"""
