"""What sbatch answers."""

from __future__ import annotations

import re


def submitted_id(text: str) -> str | None:
    """Job id in the output of `sbatch --parsable`: the last line that is one, for sites print banners."""
    found = [line.strip() for line in text.splitlines() if re.fullmatch(r"\s*\d+(;\S+)?\s*", line)]
    return found[-1].partition(";")[0] if found else None


# Words of slurm_strerror() for everything that may happen after the request has left (slurm_errno.c).
_UNCERTAIN = (
    "timed out",
    "unable to contact",
    "zero bytes",
    "connection",
    "unexpected message",
    "standby mode",
    "communication",
    "protocol",
    "temporarily unable",
    "unspecified error",
    "no error",
    "rate limit exceeded",
    "invalid authentication credential",  # of the *answer* too
)


def is_refusal(stderr: str) -> bool:
    """True when sbatch's messages prove that no job exists: Slurm or sbatch itself said no."""
    text = stderr.lower()
    if any(phrase in text for phrase in _UNCERTAIN):
        return False
    return "sbatch: " in text or "allocation failure" in text


def complaint(stderr: str) -> str:
    """The messages of a failed command in one line, without prefixes."""
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "no message"
