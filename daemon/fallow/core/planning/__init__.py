"""Decides which idle nodes to ask for, which requests to withdraw and which nodes to give back. Pure.

In goes one `Situation`: a poll, what each run could use (`Demand`), our allocations, the rules and what was learned
(`Known`). Out comes one `Plan`, with a reason for every idle node that is not used, and with what is known from then
on. `plan` is the place to begin: `share` says who gets how many nodes, `situation` who can use which, `asking` how many
there may be and how they are asked for, `withdrawals` what goes.
"""
