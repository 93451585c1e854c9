"""The head's clock: Unix time when the head began, plus monotonic seconds since.

So times outlive the head, and no step of the system clock is seen while it lives.
"""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    """Seconds; Unix time as of the head's begin, and even from then on."""
    return _BEGAN + time.monotonic()
