"""Check of an allocation's GPUs and network: `fallow doctor --gpu` starts it on each node.

Input: a folder that all nodes see. Output: one JSON value from the first worker (`AllocationFacts` in
`core.checks.gpu_checks`).
"""
