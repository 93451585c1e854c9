"""When a backward begins and ends, seen from inside: autograd's own callbacks, no patched function.

A backward begins with the first gradient that arrives. Its end is a callback of the engine, which the engine leaves out
if the backward raises. Reentrant activation checkpointing runs a backward inside of another one. The engine tells the
end of the inner one only, if all gradients come in inner ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch


class Backwards:
    """Counts the backwards of a body.

    Args:
        ended: called at the end of each backward in which a gradient arrived; True: it is the outermost.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self.running = False
        self.count = 0
        "those that `ended` takes for outermost ones"

    def begin_body(self) -> None:
        """Count from 0 again."""
        self.running, self.count, self._thread = False, 0, threading.get_ident()

    def begin(self) -> None:
        """Call in a hook, for the first gradient of a backward."""
        self.running = True
        outermost = _depth() <= (threading.get_ident() == self._thread)

        def over() -> None:
            self.running = False
            self._ended(outermost)

        torch.autograd.Variable._execution_engine.queue_callback(over)


def _depth() -> int:
    """Backward calls on this thread's stack. Of the outermost one the stack of a device's thread knows nothing."""
    code, frame, depth = torch.autograd.backward.__code__, sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code is code
        frame = frame.f_back  # type: ignore[assignment]
    return depth
