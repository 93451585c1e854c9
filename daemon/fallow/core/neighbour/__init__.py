"""Good neighbour: harvested nodes never make other people's jobs wait for long.

Input: one poll of Slurm, and the nodes that we hold or have requested.
Output of `needs`: which of our nodes to give back because a waiting job needs them, which idle nodes to leave alone,
which of our requests to withdraw, and which jobs waited for us. `permission` decides which partitions we may harvest.
`watch` remembers from poll to poll which jobs do not start. `head.slurm.neighbours` calls all of them.
"""
