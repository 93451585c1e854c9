"""Ids of runs, and tokens: the names of our jobs. Pure.

Other heads recognize our jobs by name, since a site's job_submit plugin may replace comments.
"""

import re

from fallow.model import AllocationKind, JobInfo

PREFIX = "fallow-"
"""Start of every token."""

_RUN_CHARS = 40
"""Characters of a run's id in a token; the token stays below Slurm's and our own limits (`ID_PATTERN`)."""

_NAME_CHARS = 48
"""Characters of a run's name in its id."""

_TOKEN = re.compile(rf"{PREFIX}.+-([bhn])\d+-[0-9a-f]{{6}}")


def new_run_id(name: str, salt: str) -> str:
    """Return an id for a run, which is safe as a folder's name, as a word of a comment and in a shell."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name[:_NAME_CHARS]).lstrip(".-")
    return f"{plain or 'run'}-{salt}"


def new_token(run: str, kind: AllocationKind, number: int, salt: str, *, normal_priority: bool = False) -> str:
    """Return the name of an allocation's job.

    Args:
        run: id of the run.
        kind: of the allocation.
        number: of the allocation within the run.
        salt: six random hexadecimal digits, unlike those of other heads.
        normal_priority: requested with normal priority.
    """
    letter = "n" if normal_priority else kind.value[0]
    return f"{PREFIX}{run[:_RUN_CHARS]}-{letter}{number}-{salt}"


def token_in(job: JobInfo) -> bool:
    """Return True if the job has a token of any head, in its name or comment (a user's own base job keeps its name)."""
    return any(_TOKEN.fullmatch(word) for word in (job.name, *job.comment.split()))


def names_harvest(word: str) -> bool:
    """Return True for the token of a harvest job."""
    match = _TOKEN.fullmatch(word)
    return match is not None and match[1] == "h"


def kind_of(token: str) -> AllocationKind | None:
    """Return the kind of the allocation with this token; None: it is not a token."""
    match = _TOKEN.fullmatch(token)
    return None if match is None else AllocationKind.BASE if match[1] == "b" else AllocationKind.HARVEST


def carries_token(job: JobInfo) -> bool:
    """Return True if the job's name, or a word of its comment, starts as a token does."""
    return any(word.startswith(PREFIX) for word in (job.name, *job.comment.split()))
