"""A node whose link holds the whole run up is named, and let go where it was harvested."""

from __future__ import annotations

from fallow.core.membership import events as ev
from fallow.core.training.slow_links import Finding, Member
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import MemberPhase


def look(turn: Turn, run: Run, step_s: float, lasted_s: float) -> None:
    """Take in a stretch of undisturbed training, see `core.slow_links`."""
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
    text, goes = _words(run, finding), _may_go(run, finding.node)
    if goes:
        run.slow_link = ""
        turn.apply(run, ev.Bar(at=turn.at, host=finding.node, reason=text))
    else:
        if not run.slow_link:
            turn.record(run, "slow-link", text, node=finding.node)
        run.slow_link = f"{text}; check the network of {finding.node}"


def _members(run: Run) -> list[Member]:
    """All members; none if it cannot be told which connection leads to which host."""
    nodes = [run.roster.nodes[n] for n in run.roster.members if n in run.progress]
    host_of = {node.entry: node.host for node in nodes}
    if len(nodes) < len(run.roster.members) or len(set(host_of.values())) < len(host_of):
        return []
    return [
        Member(
            node=node.host,
            index=node.id,
            harvested=run.allocations[node.token].harvested,
            pace_s=run.progress[node.id].pace_s,
            busy_links={
                host_of[entry]: share for entry, share in run.progress[node.id].busy_links.items() if entry in host_of
            },
        )
        for node in nodes
    ]


def _may_go(run: Run, host: str) -> bool:
    """It is harvested, nobody else is leaving, and enough members are left."""
    r = run.roster
    there = [n for n in r.members if r.nodes[n].host == host]
    left = len(r.present(MemberPhase.MEMBER)) - len(there)
    is_calm = not r.present(MemberPhase.LEAVING)
    harvested = all(run.allocations[r.nodes[n].token].harvested for n in there)
    return harvested and is_calm and left >= run.root.minimum


def _words(run: Run, finding: Finding) -> str:
    batch = 0 if run.root.contract is None else run.root.contract.global_batch
    speeds = [f"{batch / seconds:.3g}" for seconds in (finding.step_s, finding.without_s)]
    return f"{finding.node}'s link holds the run up: {speeds[0]} samples/s with it, about {speeds[1]} without"
