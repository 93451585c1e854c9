"""Accounting of node time: what runs may use, what they have used, and when a request must wait. Pure.

In: allocations, jobs as polls show them, prices. Out: use by project, fair-share weights, remaining budgets, and
backoff for accounts and partitions (`backoff`). `pacing` compares a run with its deadline.
"""
