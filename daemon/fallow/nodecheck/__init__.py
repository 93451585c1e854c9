"""A look at the nodes of an allocation, from their GPUs' side: `fallow doctor --gpu` starts it on each node.

In: a folder that all nodes see. Out: one JSON value from the first worker (`core.checks.gpu_checks.AllocationFacts`).
"""
