"""The head's interface to people and programs.

In: requests over the control socket (`handler`), carried out by `operations`. Out: views and reports, derived from the
registry and the last poll. `pruning` removes the files and records of old runs.
"""
