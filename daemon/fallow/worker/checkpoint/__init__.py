"""Durable checkpoints: each member writes its part of the replicated state; complete or absent; checked before use.

`manifest` (no torch) says what a complete one is and where; `parts` cuts the state; `writer` writes it beside the
training, in the format of torch.distributed.checkpoint; `restore` reads.
"""
