"""What `fallow doctor` finds out about a site and its nodes, and what a node may use. Pure.

In: Slurm's configuration, facts from nodes, settings. Out: verdicts in words (`site`, `gpu_checks`), the devices of a
worker (`devices`), and the address and ports on which members listen (`network`).
"""
