"""The report of `fallow simulate` for people: a table of the policies, and what must be known to read it."""

from __future__ import annotations

from fallow.cli.tables import duration
from fallow.model import SimReport

COLUMNS = (
    *("POLICY", "IDEAL", "UTILITY", "HARVESTED", "ABSORBS/D", "RELEASES/D", "LOST/D"),
    *("DELAYED", "P95 S", "MAX S", "RPCS/MIN"),
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
        f"{trace.name}: {duration(found.seconds)}, {trace.jobs} records, {idle_nodes:.1f} idle nodes on average; "
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
        lines.append(f"{last.name}: stopped after {duration(last.seconds)}")
    return lines
