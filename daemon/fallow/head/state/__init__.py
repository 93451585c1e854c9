"""The head's memory and its claim to the state folder. Nothing here decides or sends.

`registry` holds the runs, their allocations and the allow-list of keys. `stored` holds the records of runs: it also
salvages unreadable records and sums up removed runs. `lease` ensures that a folder has one head. All other packages of
the head import this one.
"""
