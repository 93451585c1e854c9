"""The clock that a head uses for all decisions."""

import time

_OFFSET_S = time.time() - time.monotonic()


def steady() -> float:
    """Return the Unix time at which this process began, plus the monotonic seconds since then.

    A later head can read stored times, and a step of the system clock moves no deadline of a head that runs.
    `slurm.state.on_our_clock` puts Slurm's times on this clock.
    """
    return _OFFSET_S + time.monotonic()
