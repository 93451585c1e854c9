"""Numbers in SchedulerParameters (https://slurm.schedmd.com/slurm.conf.html#OPT_SchedulerParameters). Pure."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=64)
def numbers(pattern: str, parameters: str) -> tuple[int, ...]:
    """Those behind some words, in their order; kept, for every plan asks for the same.

    Args:
        pattern: regular expression with one group, the number.
        parameters: as Slurm shows them.
    """
    return tuple(int(number) for number in re.findall(pattern, parameters))
