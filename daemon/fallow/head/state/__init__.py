"""What the head keeps in memory, and whose state folder it is. Nothing here decides or speaks.

`book` holds the runs, their allocations and who may speak for what; `stored` the records of runs, also what is left of
those that are removed or unreadable; `lease` that there is one head. All other packages of the head stand on this one.
"""
