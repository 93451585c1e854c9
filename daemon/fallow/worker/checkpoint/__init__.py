"""Durable checkpoints: each member writes its part of the replicated state; complete or absent; checked before use.

`manifest` (no torch) says what a complete one is and where; `parts` cuts the state; `dcp` writes in the format of
torch.distributed.checkpoint; `writer` does it beside the training; `restore` reads.
"""
