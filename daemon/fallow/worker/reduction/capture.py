"""Sees every outermost backward inside `run.steps`: the reduction ends there, and its root is the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def backward_seen(
    before: Callable[[Any], None], after: Callable[[], None], failed: Callable[[BaseException], None]
) -> Iterator[None]:
    """While the context is open, call `before(root)` and `after()` around each outermost backward.

    `failed(error)` is called instead of `after` if it raises.

    `torch.Tensor.backward` looks `torch.autograd.backward` up at each call, so replacing that one name sees both.
    A backward inside a backward (reentrant activation checkpointing) is part of the outer one.
    """
    inner = torch.autograd.backward
    depth = 0

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if depth:
            inner(tensors, *args, **kwargs)
            return
        depth += 1
        try:
            before(tensors)
            inner(tensors, *args, **kwargs)
        except BaseException as error:
            failed(error)
            raise
        finally:
            depth -= 1
        after()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = inner
