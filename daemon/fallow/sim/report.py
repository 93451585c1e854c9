"""From plays to what is printed: the report, and the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fallow.model import PolicyScore, Score, SimReport, TraceRead

DIGITS = 6
"""Of every number in a report: no more of them is meant, and the last bits of a sum are nobody's business."""

COLUMNS = (
    *("POLICY", "IDEAL", "UTILITY", "HARVESTED", "ABSORBS/D", "RELEASES/D", "LOST/D"),
    *("DELAYED", "P95 S", "MAX S", "RPCS/MIN"),
)


def report(played: Sequence[PolicyScore], trace: TraceRead, seed: int, arm: str, *, stopped: bool) -> SimReport:
    """What came of plays, in the order in which they were asked for; at least one.

    Args:
        played: their figures.
        trace: what its reader found.
        seed: of the simulation.
        arm: under which rules it was played, in words.
        stopped: the last policy was not played to the end.
    """
    policies = [msgspec.convert(_rounded(msgspec.to_builtins(each)), PolicyScore) for each in played]
    first = policies[0]
    return SimReport(
        **{name: getattr(first, name) for name in Score.__struct_fields__},
        policies=policies,
        trace=trace,
        seed=seed,
        seconds=first.seconds,
        arm=arm,
        stopped=stopped,
    )


def rows(found: SimReport) -> list[list[str]]:
    """Cells under `COLUMNS`."""
    return [
        [
            each.name,
            f"{each.ideal_ratio:.3f}",
            f"{each.utility:.3f}",
            f"{each.harvested_node_s / each.idle_node_s:.3f}" if each.idle_node_s else "-",
            f"{each.absorbs_per_day:.0f}",
            f"{each.releases_per_day:.0f}",
            f"{each.unannounced_per_day:.0f}",
            str(each.others_delayed.jobs),
            f"{each.others_delayed.p95_s:.1f}",
            f"{each.others_delayed.max_s:.1f}",
            f"{each.slurmctld_rpcs_per_min:.1f}",
        ]
        for each in found.policies
    ]


def foot(found: SimReport) -> list[str]:
    """What must be known to read the table, in lines."""
    trace = found.trace
    idle_nodes = found.idle_node_s / found.seconds if found.seconds else 0.0
    lines = [
        f"{trace.name}: {days(found.seconds)}, {trace.jobs} records, {idle_nodes:.1f} idle nodes on average; "
        f"{found.arm}; seed {found.seed}",
    ]
    if trace.bad_lines:
        reasons = ", ".join(f"{count} {reason}" for reason, count in trace.bad_lines.items())
        lines.append(f"skipped lines: {reasons}")
        lines += [f"  {example}" for example in trace.examples]
    lines += [f"note: {each}" for each in trace.assumed]
    lines += [f"{policy.name}: {note}" for policy in found.policies for note in policy.notes]
    if found.stopped:
        last = found.policies[-1]
        lines.append(f"{last.name}: stopped after {days(last.seconds)}")
    return lines


def days(seconds: float) -> str:
    """`2.5 days`, `1 hour`, `10 minutes`, `90 s`."""
    for least_s, unit_s, unit in ((86400, 86400, "day"), (3600, 3600, "hour"), (120, 60, "minute")):
        if seconds >= least_s:
            number = f"{seconds / unit_s:.3g}"
            return f"{number} {unit}" + ("" if number == "1" else "s")
    return f"{seconds:.0f} s"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
