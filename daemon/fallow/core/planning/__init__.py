"""Decides which idle nodes to ask for, which requests to withdraw and which nodes to give back. Pure.

In go one poll, what each run could use (`Demand`), our allocations, the rules and what was learned (`Known`); out comes
one `Plan`, with a reason for every idle node that is not used. `plan` is the place to begin; `share` says who gets how
many nodes, `offers` who can use which, `asking` how and under which caps it is asked for, `withdrawals` what goes.
"""
