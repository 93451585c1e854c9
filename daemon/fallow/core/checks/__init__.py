"""What `fallow doctor` finds out about a site and its nodes, and what a node may use. Pure.

In go Slurm's configuration, facts that nodes tell, and settings; out come findings in words (`site`, `gpu_checks`), the
devices of a worker (`devices`), and the address and ports on which members meet (`network`).
"""
