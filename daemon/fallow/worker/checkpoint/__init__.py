"""Durable checkpoints. Each member writes a part of the replicated state; a checkpoint is complete or absent.

`manifest` (no torch) defines the layout of a checkpoint's folder. `parts` cuts the state. `writer` writes the parts in
the background, in the format of torch.distributed.checkpoint. `restore` verifies and reads. `saver` decides when.
"""
