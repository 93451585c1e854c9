"""What the head keeps in memory, and whose state folder it is. Nothing here decides or speaks.

`book` holds the runs, their allocations and who may speak for what; `archive` and `salvage` what is left of runs
that are removed or unreadable; `hearing` when agents were heard; `lease` that there is one head. All other
packages of the head stand on this one.
"""
