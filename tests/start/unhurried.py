"""How long a training of the tests rests behind a step: its end must not come before the tests are done with it.

For processes that tests start: this folder is on their PYTHONPATH.
"""

import time
from pathlib import Path

SOON_S, LATE_S = 0.5, 5.0
"""Steps take so long in the last third, and near the end."""


def rest(step: int, steps: int, pace_s: float, hurry: Path) -> None:
    """Rest behind a step until the file `hurry` is there: for the pace, then for longer, behind the last step for ever.

    Args:
        step: that is finished, 0-based.
        steps: of the whole training.
        pace_s: seconds that a step takes at least; 0: only the last one takes any.
        hurry: steps take no longer than they must once it is there.
    """
    end = time.monotonic() + _rest_s(step, steps, pace_s)
    while not hurry.exists() and (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.05))


def _rest_s(step: int, steps: int, pace_s: float) -> float:
    if step == steps - 1:
        return float("inf")
    if not pace_s or step < 0.6 * steps:
        return pace_s
    return max(pace_s, SOON_S) if step < 0.85 * steps else LATE_S
