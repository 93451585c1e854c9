"""Good neighbour: harvested nodes never make other people's jobs wait for long.

In: one poll of Slurm, and the nodes that we hold or have asked for.
Out: which of our nodes to give back because a waiting job needs them, which idle nodes to leave alone, which of our
requests to withdraw, and which jobs waited for us (`needs`); in which partitions we may harvest at all (`permission`).
`watch` remembers from poll to poll which jobs do not start (`head.slurm.neighbours` holds it all together).
"""
