"""A node whose link holds the whole run up is named, and let go where it was harvested."""

from __future__ import annotations

from fallow.core import events as ev
from fallow.core.slow_links import Finding, Member
from fallow.head.book import Run
from fallow.head.turn import Turn


def look(turn: Turn, run: Run, step_s: float, lasted_s: float) -> None:
    """Take in a stretch of undisturbed training, see `core.slow_links`."""
    r = run.roster
    finding = run.slow_links.observe(
        _members(run), generation=r.generation, shards=r.shards or 0, step_s=step_s, lasted_s=lasted_s
    )
    if finding is None:
        run.slow_link = ""
        return
    text, goes = _words(run, finding), _may_go(run, finding.node)
    if goes:
        run.slow_link = ""
        turn.apply(run, ev.NodeUnwanted(at=turn.at, node=finding.node, reason=text))
    else:
        if not run.slow_link:
            turn.record(run, "slow-link", text, node=finding.node)
        run.slow_link = f"{text}; check the network of {finding.node}"


def _members(run: Run) -> list[Member]:
    """All members; none if it cannot be told which connection leads to which node."""
    r = run.roster
    workers = [r.workers[name] for name in r.members if name in r.workers and name in run.beats]
    node_of = {worker.address: worker.node for worker in workers}
    if len(workers) < len(r.members) or len(set(node_of.values())) < len(node_of):
        return []
    return [
        Member(
            node=worker.node,
            index=worker.index,
            harvested=run.allocation_of(worker.worker).harvested,
            pace_s=run.beats[worker.worker].pace_s,
            busy_links={
                node_of[address]: share
                for address, share in run.beats[worker.worker].busy_links.items()
                if address in node_of
            },
        )
        for worker in workers
    ]


def _may_go(run: Run, node: str) -> bool:
    """It is harvested, nobody else is leaving, and enough members are left."""
    r = run.roster
    there = [name for name in r.members if r.workers[name].node == node]
    left = len(r.staying()) - len(there)
    return (
        all(run.allocation_of(name).harvested for name in there) and not r.leaving() and left >= max(1, r.min_members)
    )


def _words(run: Run, finding: Finding) -> str:
    batch = run.roster.global_batch or 0
    speeds = [f"{batch / seconds:.3g}" for seconds in (finding.step_s, finding.without_s)]
    return f"{finding.node}'s link holds the run up: {speeds[0]} samples/s with it, about {speeds[1]} without"
