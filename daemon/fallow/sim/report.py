"""From plays to what is printed: the report, and the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fallow.model import PolicyScore, Score, SimReport, Struct, TraceRead
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.series import Series
from fallow.sim.types import Problems

DIGITS = 6
"""Of every number in a report: no more of them is meant, and the last bits of a sum are nobody's business."""

COLUMNS = (
    "POLICY", "IDEAL", "HARVESTED", "ABSORBS/D", "RELEASES/D", "LOST/D", "DELAYED", "P95 S", "MAX S", "RPCS/MIN",
)  # fmt: skip


class Played(Struct, frozen=True, kw_only=True):
    """One policy, played."""

    name: str
    score: Score
    seconds: float
    "that were played"
    stopped: bool
    "before the end"
    absorb_s: float
    "what a change costs that takes nodes in, median"
    notes: tuple[str, ...] = ()
    series: Series | None = None


def trace_read(name: str, problems: Problems) -> TraceRead:
    """What the reader found. `name`: as people call the trace, without the folders it lies in."""
    return TraceRead(
        name=name,
        jobs=problems.used,
        bad_lines=dict(sorted(problems.bad.items())),
        examples=list(problems.examples),
        assumed=list(problems.assumed),
    )


def report(played: Sequence[Played], trace: TraceRead, seed: int, arm: str) -> SimReport:
    """In the order in which they were asked for; at least one."""
    policies = [
        _rounded(
            PolicyScore(
                **{name: getattr(each.score, name) for name in Score.__struct_fields__},
                name=each.name,
                seconds=each.seconds,
                notes=list(each.notes),
            )
        )
        for each in played
    ]
    first = policies[0]
    return SimReport(
        **{name: getattr(first, name) for name in Score.__struct_fields__},
        policies=policies,
        trace=trace,
        seed=seed,
        seconds=first.seconds,
        arm=arm,
        stopped=any(each.stopped for each in played),
    )


def rows(found: SimReport) -> list[list[str]]:
    """Cells under `COLUMNS`."""
    return [
        [
            each.name,
            f"{each.ideal_ratio:.3f}",
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


LONG_S = (120.0, 600.0, 3600.0)
"""Of holes longer than this a report tells which share of the idle time is in them."""


def foot(found: SimReport, holes: HoleLengths) -> list[str]:
    """What must be known to read the table, in lines."""
    trace = found.trace
    idle_nodes = found.idle_node_s / found.seconds if found.seconds else 0.0
    lines = [
        f"{trace.name}: {days(found.seconds)}, {trace.jobs} records, {idle_nodes:.1f} idle nodes on average; "
        f"{found.arm}; seed {found.seed}",
        told(holes),
    ]
    if trace.bad_lines:
        reasons = ", ".join(f"{count} {reason}" for reason, count in trace.bad_lines.items())
        lines.append(f"skipped lines: {reasons}")
        lines += [f"  {example}" for example in trace.examples]
    lines += [f"note: {each}" for each in trace.assumed]
    longest_s = max(policy.seconds for policy in found.policies)
    for policy in found.policies:
        if policy.seconds < longest_s:
            lines.append(f"{policy.name}: stopped after {days(policy.seconds)}")
        lines += [f"{policy.name}: {note}" for note in policy.notes]
    if found.stopped and all(policy.seconds == longest_s for policy in found.policies):
        lines.append("stopped before the end of the trace")
    return lines


def told(holes: HoleLengths) -> str:
    """How long holes last, in a line."""
    if not len(holes):
        return "holes: none, no node was idle"
    p50, p90 = (holes.quantile(q) for q in (0.5, 0.9))
    half, most = ("not known" if each is None else days(each) for each in (p50, p90))
    shares = ", ".join(f"{holes.idle_longer(each):.1%} in those over {days(each)}" for each in LONG_S)
    return f"holes without us: {len(holes)}, p50 {half}, p90 {most}; of the idle time {shares}"


def days(seconds: float) -> str:
    """`2.5 days`, `1 hour`, `10 minutes`, `90 s`."""
    for least_s, unit_s, unit in ((86400, 86400, "day"), (3600, 3600, "hour"), (120, 60, "minute")):
        if seconds >= least_s:
            number = f"{seconds / unit_s:.3g}"
            return f"{number} {unit}" + ("" if number == "1" else "s")
    return f"{seconds:.0f} s"


def _rounded(value: PolicyScore) -> PolicyScore:
    return msgspec.convert(_round(msgspec.to_builtins(value)), PolicyScore)


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_round(each) for each in value]
    return value
