"""Ids of runs, and tokens: the exact names of our jobs. Pure.

Other heads know a job of ours by its name, too: a site's job_submit plugin may write comments of its own.
"""

import re

from fallow.model import AllocationKind, JobInfo

PREFIX = "fallow-"
"""Of every token."""

_RUN_CHARS = 40
"""As much of a run's name as a token shows; the whole stays below Slurm's and our own limits (`ID_PATTERN`)."""

_NAME_CHARS = 48
"""As much of a run's name as its id shows."""

_TOKEN = re.compile(rf"{PREFIX}.+-([bhn])\d+-[0-9a-f]{{6}}")


def new_run_id(name: str, salt: str) -> str:
    """An id for a run. Slurm takes every job name; a folder, a job name in a comment and a prompt do not."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name[:_NAME_CHARS]).lstrip(".-")
    return f"{plain or 'run'}-{salt}"


def new_token(run: str, kind: AllocationKind, number: int, salt: str, *, hurried: bool = False) -> str:
    """A name for an allocation.

    Args:
        run: its id.
        kind: of the allocation.
        number: its own among the run's.
        salt: six hexadecimal digits that no other head's have.
        hurried: it is asked for with normal priority.
    """
    letter = "n" if hurried else kind.value[0]
    return f"{PREFIX}{run[:_RUN_CHARS]}-{letter}{number}-{salt}"


def token_in(job: JobInfo) -> bool:
    """Does it carry anybody's token, in its name or in its comment (a user's own base job keeps its name)?"""
    return any(_TOKEN.fullmatch(word) for word in (job.name, *job.comment.split()))


def names_harvest(word: str) -> bool:
    """Is it the token of a job that was made to pick up an idle node?"""
    found = _TOKEN.fullmatch(word)
    return found is not None and found[1] == "h"


def carries_token(job: JobInfo) -> bool:
    """Does its name begin as tokens do, or a word of its comment (a user's own base job keeps its name)?"""
    return any(word.startswith(PREFIX) for word in (job.name, *job.comment.split()))
