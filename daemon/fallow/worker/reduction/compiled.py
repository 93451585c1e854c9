"""`torch.compile` and the overlap of reduction with backward.

A compiled graph hands out all gradients when its whole backward is over, so nothing is left to overlap with. For DDP
dynamo therefore cuts the graph where DDP's buckets end. It asks a class attribute which DDP module is at work, and
reads one number of it; here that number is told for the reducer. The attribute is private to torch: where it is
missing, or is used by a real DDP module, nothing is done, and compiled models are reduced after their backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fallow.worker.reduction.buckets import BUCKET_BYTES

_NAME = "_active_ddp_module"


@contextmanager
def graphs_cut_at_buckets() -> Iterator[None]:
    """While the context is open, models are compiled in pieces of the size of a bucket.

    `torch._dynamo.config.optimize_ddp = False` switches it off, as it does for DDP.
    """
    owner: Any = DistributedDataParallel
    if getattr(owner, _NAME, owner) is not None:
        yield
        return
    setattr(owner, _NAME, SimpleNamespace(bucket_bytes_cap=BUCKET_BYTES))
    try:
        yield
    finally:
        setattr(owner, _NAME, None)
