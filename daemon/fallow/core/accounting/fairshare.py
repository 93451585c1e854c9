"""Fair share of harvested nodes between projects (Slurm accounts). Pure.

All projects that have a run get equal shares. As in Slurm's own fair share, use decays with a half-life. The weight of
a project falls by a power of two of its use above its share (`slurm.schedmd.com/priority_multifactor.html`).
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

HALF_LIFE_S = 86400.0
"""Half-life of past use in seconds."""

NEGLIGIBLE_S = 10 * 3600.0
"""Node-seconds of use below which differences say little: added, in equal parts, to what the projects used."""

LEAST, MOST = 0.25, 2.0
"""Bounds of a project's factor, so that no project is shut out."""


def faded_use(spans: Iterable[tuple[float, float]], at: float) -> float:
    """Node-seconds of use, each second counting half for every `HALF_LIFE_S` that has passed since.

    Args:
        spans: begin and end (Unix time) of each node's use.
        at: Unix time, now.
    """
    # The integral of 2^(-(at - t) / half-life) over each span is the half-life / ln 2 times the difference at its ends.
    total = 0.0
    for begin, end in spans:
        last = min(end, at)
        if last > begin:
            total += 0.5 ** ((at - last) / HALF_LIFE_S) - 0.5 ** ((at - begin) / HALF_LIFE_S)
    return total * HALF_LIFE_S / 0.6931471805599453


class PastUse(msgspec.Struct, kw_only=True):
    """Decayed use of allocations that are no longer stored one by one."""

    node_s: float = 0.0
    "node-seconds as they counted at `at`"
    at: float = 0.0
    "Unix time"

    def faded(self, at: float) -> float:
        """Node-seconds as they count at this Unix time."""
        return float(self.node_s * 0.5 ** (max(0.0, at - self.at) / HALF_LIFE_S))

    def add(self, spans: Iterable[tuple[float, float]], at: float) -> None:
        """Add spans that are over; see `faded_use`."""
        self.node_s, self.at = self.faded(at) + faded_use(spans, at), at

    def merge(self, other: "PastUse") -> None:
        """Add the use of another `PastUse`."""
        at = max(self.at, other.at)
        self.node_s, self.at = self.faded(at) + other.faded(at), at


def weights(runs: Collection[tuple[str, str, float]], use: Mapping[str, float]) -> dict[str, float]:
    """Run -> weight of its gain against other runs. A project's share does not depend on its number of runs.

    Args:
        runs: (run, project, weight against other runs of the project) of all runs that have not ended.
        use: project of such a run -> decayed node-seconds of idle nodes, including runs that have ended.
    """
    sums: dict[str, float] = {}
    for _, project, weight in runs:
        sums[project] = sums.get(project, 0.0) + weight
    factor = factors({project: use.get(project, 0.0) for project in sums})
    return {run: factor[project] * weight / sums[project] for run, project, weight in runs}


def factors(use: Mapping[str, float]) -> dict[str, float]:
    """Project -> factor of its runs' weights: 1 for a project that used its share, 2 for a project that used nothing.

    Args:
        use: decayed node-seconds of each project that has a run.
    """
    if not use:
        return {}
    equal_share = 1.0 / len(use)
    total = sum(use.values()) + NEGLIGIBLE_S
    return {
        project: min(MOST, max(LEAST, 2.0 ** (1.0 - (had + NEGLIGIBLE_S * equal_share) / total / equal_share)))
        for project, had in use.items()
    }
