"""The one clock by which a head decides."""

import time

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    """Unix time when this process began, plus monotonic seconds since.

    So times outlive the head, and no step of the system clock is seen while the head lives. What Slurm says of times is
    put on this clock (`slurm.state.on_our_clock`).
    """
    return _BEGAN + time.monotonic()
