"""When a backward ends, seen from inside: autograd's own callback, no patched function.

The engine leaves the callback out if the backward raises. Reentrant activation checkpointing runs a backward inside of
another one. The engine tells the end of the inner one only, if all gradients come in inner ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch


def call_at_end(script_thread: int, ended: Callable[[bool], None]) -> None:
    """Call this in a hook, for the first gradient of a backward: at its end `ended` is called.

    Args:
        script_thread: the thread on which the script makes its backwards.
        ended: gets True if this is the outermost backward.
    """
    outermost = _depth() <= (threading.get_ident() == script_thread)
    torch.autograd.Variable._execution_engine.queue_callback(lambda: ended(outermost))


def _depth() -> int:
    """Backward calls on this thread's stack. Of the outermost one the stack of a device's thread knows nothing."""
    code, frame, depth = torch.autograd.backward.__code__, sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code is code
        frame = frame.f_back  # type: ignore[assignment]
    return depth
