"""`torch.nn.utils.clip_grad_value_` in void bodies, where no parameter has a gradient.

Unlike `clip_grad_norm_` it fails there: it has torch group an empty list. The function that does so is private to
torch; where it is missing nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import clip_grad

_NAME = "_group_tensors_by_device_and_dtype"


@contextmanager
def nothing_may_be_clipped() -> Iterator[None]:
    """While the context is open, no gradients at all are grouped into no groups at all."""
    inner = getattr(clip_grad, _NAME, None)
    if inner is None:
        yield
        return

    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(tensors, *args, **kwargs) if any(tensors) else {}

    setattr(clip_grad, _NAME, group)
    try:
        yield
    finally:
        setattr(clip_grad, _NAME, inner)
