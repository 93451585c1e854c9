"""Fair share of harvested nodes between projects (Slurm accounts). Pure.

All projects that have a run are due the same part. As in Slurm's own fair share, use fades with a half-life, and a
project counts less by a power of two of what it had beyond its due (`slurm.schedmd.com/priority_multifactor.html`).
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

HALF_LIFE_S = 86400.0
"""Of past use."""

NEGLIGIBLE_S = 10 * 3600.0
"""Node-seconds of use below which differences say little: added, in equal parts, to what the projects had."""

LEAST, MOST = 0.25, 2.0
"""A project's factor stays within these, so that none is shut out."""


def faded_use(spans: Iterable[tuple[float, float]], at: float) -> float:
    """Node-seconds of use, each second counting half for every `HALF_LIFE_S` that has passed since.

    Args:
        spans: beginning and end (Unix time) of each node's use.
        at: now.
    """
    # The integral of 2^(-(at - t) / half-life) over each span is the half-life / ln 2 times the difference at its ends.
    total = 0.0
    for begin, end in spans:
        last = min(end, at)
        if last > begin:
            total += 0.5 ** ((at - last) / HALF_LIFE_S) - 0.5 ** ((at - begin) / HALF_LIFE_S)
    return total * HALF_LIFE_S / 0.6931471805599453


class PastUse(msgspec.Struct, kw_only=True):
    """Faded use of what is no longer looked at one by one."""

    node_s: float = 0.0
    "as it counted at `at`"
    at: float = 0.0
    "Unix time"

    def faded(self, at: float) -> float:
        """Node-seconds, as they count at that Unix time."""
        return float(self.node_s * 0.5 ** (max(0.0, at - self.at) / HALF_LIFE_S))

    def add(self, spans: Iterable[tuple[float, float]], at: float) -> None:
        """Take in what is over; see `faded_use`."""
        self.node_s, self.at = self.faded(at) + faded_use(spans, at), at

    def merge(self, other: "PastUse") -> None:
        """Take in the use of another one."""
        at = max(self.at, other.at)
        self.node_s, self.at = self.faded(at) + other.faded(at), at


def weights(runs: Collection[tuple[str, str, float]], use: Mapping[str, float]) -> dict[str, float]:
    """Run -> weight of its gain beside that of others. A project's part does not depend on the number of its runs.

    Args:
        runs: that have not ended, each with its project and its weight beside other runs of that.
        use: project of such a run -> faded node-seconds of idle nodes that it has had, by runs that have ended too.
    """
    sums: dict[str, float] = {}
    for _, project, weight in runs:
        sums[project] = sums.get(project, 0.0) + weight
    due = factors({project: use.get(project, 0.0) for project in sums})
    return {run: due[project] * weight / sums[project] for run, project, weight in runs}


def factors(use: Mapping[str, float]) -> dict[str, float]:
    """Project -> what its runs' weights are multiplied by: 1 for one that had its due, 2 for one that had nothing.

    Args:
        use: faded node-seconds of each project that has a run.
    """
    if not use:
        return {}
    due = 1.0 / len(use)
    total = sum(use.values()) + NEGLIGIBLE_S
    return {
        project: min(MOST, max(LEAST, 2.0 ** (1.0 - (had + NEGLIGIBLE_S * due) / total / due)))
        for project, had in use.items()
    }
