"""Training speed of runs, measured from reports: steps per second in stretches without membership changes.

A node whose link slows the whole run down is named in a message, and released if it is harvested
(`core.training.slow_links`).
"""

from statistics import median

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Report
from fallow.core.training.slow_links import Finding, Member
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Run, Stretch
from fallow.model import MemberPhase, RunStatus

LONG_ENOUGH_S = 15.0
"""Shortest stretch that is measured."""

STEPS = 3
"""Smallest number of steps in a measured stretch. Reports come twice a second, which limits the precision."""

WARM = 2
"""Steps after a change that do not count: the last part of the state is still being sent, and caches are cold."""

WRITE_EVERY_S = 60.0
"""Interval between writes of the curve. Later measurements are lost if the head is killed."""


def observe(turn: Turn, run: Run, node: int) -> None:
    """Measure speed from a node's new report. Only the first member counts: all members take the same steps."""
    r, root = run.roster, run.root
    if not r.members or node != r.members[0]:
        return
    report = run.machine.watch.reports.get(node)
    if report is None or not _is_steady(run, report) or _is_one_machine(run):
        run.stretch = None
        return
    stretch = run.stretch
    if stretch is None or stretch.generation != root.generation or report.step < stretch.step:
        run.stretch = Stretch(root.generation, report.step)
        return
    if report.step == stretch.step:
        return
    stretch.warm += report.step - stretch.step
    stretch.step = report.step
    if stretch.begin is None:
        if stretch.warm > WARM:
            stretch.begin = turn.at, report.step
        return
    began_at, first = stretch.begin
    lasted_s, steps = turn.at - began_at, report.step - first
    if lasted_s >= LONG_ENOUGH_S and steps >= STEPS:
        _record_speed(turn, run, lasted_s / steps, lasted_s)
        stretch.begin = turn.at, report.step
        _look_at_links(turn, run, lasted_s / steps, lasted_s)


def _is_steady(run: Run, report: Report) -> bool:
    """The member computes in the committed generation, and no change is under way."""
    root = run.root
    computes = report.generation == root.generation > report.given_up
    is_calm = run.machine.ballot is None and not run.roster.finishing
    return root.status is RunStatus.TRAINING and computes and is_calm


def _is_one_machine(run: Run) -> bool:
    """True if several nodes share a machine, as on a testbed. Such nodes slow each other down, so skip them."""
    members = [run.roster.nodes[n] for n in run.roster.members]
    machines = {member.host: member.entry for member in members}
    return len(set(machines.values())) < len(machines)


def _record_speed(turn: Turn, run: Run, step_s: float, lasted_s: float) -> None:
    curve, nodes = run.record.curve, [run.roster.nodes[n] for n in run.roster.members]
    curve.observe(sum(node.slots for node in nodes), step_s, lasted_s, turn.now)
    slots_and_paces = [(node.slots, run.progress[node.id].pace_s) for node in nodes if node.id in run.progress]
    # A node's workers compute shards in parallel.
    if paces := [slots * pace_s for slots, pace_s in slots_and_paces if pace_s > 0]:
        curve.shard_s = median(paces)
    if turn.at - run.curve_written >= WRITE_EVERY_S:
        run.curve_written = turn.at
        turn.dirty.add(run.id)


def _look_at_links(turn: Turn, run: Run, step_s: float, lasted_s: float) -> None:
    """Look for a slow link in a stretch of undisturbed training."""
    contract = run.root.contract
    finding = run.slow_links.observe(
        _members(run),
        generation=run.root.generation,
        shards=0 if contract is None else contract.shards,
        step_s=step_s,
        lasted_s=lasted_s,
    )
    if finding is None:
        run.slow_link = ""
        return
    text, is_released = _words(run, finding), _may_release(run, finding.node)
    if is_released:
        run.slow_link = ""
        turn.apply(run, ev.Bar(at=turn.at, host=finding.node, reason=text))
    else:
        if not run.slow_link:
            turn.record(run, "slow-link", text, node=finding.node)
        run.slow_link = f"{text}; check the network of {finding.node}"


def _members(run: Run) -> list[Member]:
    """All members; an empty list if the host of a connection is ambiguous."""
    nodes = [run.roster.nodes[n] for n in run.roster.members if n in run.progress]
    host_of = {node.entry: node.host for node in nodes}
    if len(nodes) < len(run.roster.members) or len(set(host_of.values())) < len(host_of):
        return []
    return [
        Member(
            node=node.host,
            index=node.id,
            harvested=run.allocations[node.token].is_harvested,
            pace_s=run.progress[node.id].pace_s,
            busy_links={
                host_of[entry]: share for entry, share in run.progress[node.id].busy_links.items() if entry in host_of
            },
        )
        for node in nodes
    ]


def _may_release(run: Run, host: str) -> bool:
    """True if the host may be released: it is harvested, no member is leaving, and enough members remain."""
    r = run.roster
    host_members = [n for n in r.members if r.nodes[n].host == host]
    remaining = len(r.present(MemberPhase.MEMBER)) - len(host_members)
    is_calm = not r.present(MemberPhase.LEAVING)
    harvested = all(run.allocations[r.nodes[n].token].is_harvested for n in host_members)
    return harvested and is_calm and remaining >= run.root.minimum


def _words(run: Run, finding: Finding) -> str:
    batch = 0 if run.root.contract is None else run.root.contract.global_batch
    speeds = [f"{batch / seconds:.3g}" for seconds in (finding.step_s, finding.without_s)]
    return f"{finding.node}'s link holds the run up: {speeds[0]} samples/s with it, about {speeds[1]} without"
