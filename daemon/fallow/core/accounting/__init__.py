"""Counts what runs may use and have used, and backs off where Slurm or jobs say no. Pure.

In go allocations, jobs as polls show them, and prices; out come use by project, weights, what is left of budgets, and
what is left alone for a while and in whose name (`backoff`). `pacing` compares a run with its deadline.
"""
