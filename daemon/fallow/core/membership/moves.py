"""Actions of the table `tables.RUN`: propose a generation, give it up, commit it, complete it."""

from typing import Any

import msgspec

from fallow.core.membership import losses
from fallow.core.membership.messages import Peer, Plan
from fallow.core.membership.names import member_name
from fallow.core.membership.proposals import Proposal, after_loss, planned, to_drop
from fallow.core.membership.records import Change, FailureKind, Node
from fallow.core.membership.roster import check_of
from fallow.core.membership.state import Ballot, State
from fallow.core.membership.watch import DEAF_S, Overdue
from fallow.model import ChangeKind, Exit, GenerationReport, RunStatus
from fallow.text import counted

ATTEMPTS = 3
"""Number of consecutive generations in which the same step may fail."""
MAX_FIRST_STEPS = 50
"""Number of generations whose first step is remembered."""

_LEFT_EARLY = (
    "the script ended inside of the run.updates loop, which all workers have to leave in the same step, after its "
    "inner loop: "
)
_STUCK = (
    "step {step}: in {times} generations one after the other all members have waited for each other, for {s:.0f} s in "
    "the last, and no step was finished: {last}. They reach each other over the network, so either it does not carry "
    "what they send, or the script has members wait for each other by other means: look at what the nodes' network "
    "interfaces count as lost, and at the script for locks, files and process groups of its own"
)

# -- propose ----------------------------------------------------------------------------------------------------------


def prepare(m: State) -> None:
    proposal = planned(m)
    assert proposal is not None
    _begin(m, proposal)


def probe(m: State) -> None:
    """Have members build a spare group, to test whether they reach each other."""
    reason = f"all members wait for each other, for {m.watch.all_wait_s():.1f} s now"
    m.outbox.log("probe", f"generation {m.roster.root.highest + 1} looks at the links: {reason}")
    _begin(m, Proposal(ChangeKind.EJECT, m.roster.members, [], reason), probe=True)


def rebuild_group(m: State) -> None:
    """Rebuild a group that broke although no node has ended.

    If collectives always fail on one node, every group breaks there first. So a node on which `ATTEMPTS` consecutive
    groups broke first, at the same step of that node, is ejected, and the other members continue. The node may come
    back with new processes. If that does not help, its host is barred, as after other failures.

    In restart mode a broken group means a failed script, and `core.training.restarts` counts the failures.
    """
    r, broken = m.roster, m.trouble.group
    assert broken is not None
    if r.restarts:
        rebuild(m, broken.text)
    elif m.trouble.count(broken.node, broken.step) < ATTEMPTS or not r.alive(broken.node):
        rebuild(m, f"the group broke ({broken.text})")
    else:
        m.trouble.group = None
        reason = f"{ATTEMPTS} groups in a row broke at its step {broken.step}, the last because {broken.text}"
        losses.eject(m, Overdue(r.nodes[broken.node], reason, FailureKind.UNREACHABLE))


def rebuild_first_exchange(m: State) -> None:
    m.trouble.probe_s *= 2
    rebuild(m, f"the first exchange of generation {m.roster.root.generation} does not end")


def rebuild_stuck(m: State) -> None:
    """Rebuild the group of members that all wait for each other without end; end the run if that has not helped."""
    r, waited_s, front = m.roster, m.watch.all_wait_s(), m.roster.front
    reports = [m.watch.reports[n] for n in r.present() if n in m.watch.reports]
    in_call = [report.node for report in reports if report.in_call]
    if 0 < len(in_call) < len(reports):
        text = f"step {front}: the members have waited for each other for {waited_s:.0f} s in different places"
        where = f"of the script: {r.names(in_call)} in run.mean or run.barrier, the others not"
        losses.end_run(m, RunStatus.FAILED, f"{text} {where}")
    elif m.trouble.count(0, front) == ATTEMPTS:
        text = _STUCK.format(step=front, times=ATTEMPTS, s=waited_s, last=r.names(r.present()))
        losses.end_run(m, RunStatus.FAILED, text)
    else:
        rebuild(m, f"all members waited for each other for {waited_s:.1f} s")


def rebuild(m: State, reason: str = "") -> None:
    """Propose a generation of the survivors of a broken one, or suspend the run if there are none.

    Args:
        m: state of the run.
        reason: why the generation broke, if no member is lost and no ballot is spoiled.
    """
    r, root, losses_by_node = m.roster, m.roster.root, m.trouble.lost_members
    by_reason = {
        why: [n for n in losses_by_node if losses_by_node[n] == why and n in r.nodes] for why in losses_by_node.values()
    }
    loss_text = "; ".join(f"{r.names(nodes)} is gone: {why}" for why, nodes in by_reason.items())
    reason = loss_text or reason or (m.ballot.spoiled if m.ballot is not None else "")
    if m.ballot is not None and m.ballot.change.interrupt:
        reason = f"{m.ballot.change.reason}; {reason}"  # no other log entry has its reason
    elif root.rollback_below:
        reason = f"{r.rolled_back}; {reason}"
    for n in filter(r.alive, r.leavers if root.entered else []):
        losses.dismiss(m, r.nodes[n], Exit.OK, r.nodes[n].leaving)
    survivors = [n for n in r.inside() if r.alive(n)]
    m.trouble.broken = max(root.generation, m.trouble.broken)
    m.tell(survivors)
    proposal = after_loss(m, survivors, reason)
    if proposal is not None:
        _begin(m, proposal, interrupt=True)
    else:
        _suspend(m, survivors, reason)


def _suspend(m: State, leavers: list[int], reason: str) -> None:
    """Suspend the run, or end it if its last member failed. No member is left that could continue."""
    r, root, code = m.roster, m.roster.root, m.trouble.code
    m.tell(m.participants())
    m.ballot = m.trouble.group = m.trouble.code = None
    m.trouble.lost_members.clear()
    if not root.old_may_step:
        _end_change(m)
    for n in leavers:  # these nodes were to leave before they had the state
        losses.dismiss(m, r.nodes[n], Exit.OK, r.nodes[n].leaving)
    if code not in (None, Exit.TEMPFAIL):
        losses.end_run(m, RunStatus.FAILED, reason if code else _LEFT_EARLY + reason)
    else:
        root.status = RunStatus.SUSPENDED
        m.outbox.log("lost", f"no member is there ({reason}); the run goes on from {_resume_point(m)}")


def _begin(m: State, proposal: Proposal, *, interrupt: bool = False, probe: bool = False) -> None:
    """Number the generation and ask for votes. The number is stored before any node learns of it."""
    r, root, timing = m.roster, m.roster.root, m.timing
    m.tell(m.participants())
    root.highest += 1
    members = list(proposal.members)
    change = Change(
        generation=root.highest,
        replaces=root.generation,
        kind=proposal.kind,
        leavers=proposal.leavers,
        joined=[n for n in members if not r.is_inside(r.nodes[n])],
        reason=proposal.reason,
        began_at=m.at,
        interrupt=interrupt,
        probe=probe,
    )
    wait_s = min(timing.prepare_s, timing.rebuild_s) if interrupt or probe else timing.prepare_s
    now = m.watch.now
    # Nodes that leave a broken generation need not vote.
    awaited = set(members) if interrupt else {*members, *proposal.leavers}
    m.ballot = Ballot(change, members, *_plans(m, change, members, wait_s), now, now + wait_s, awaited)
    m.trouble.lost_members.clear()
    m.trouble.group = m.trouble.code = None
    m.tell(m.participants())


def _plans(m: State, change: Change, members: list[int], wait_s: float) -> tuple[Plan, Plan]:
    """Return the plan with the full member list, and as a difference for members of the previous generation."""
    r, root, chosen = m.roster, m.roster.root, set(members)
    peers = {n: Peer(n, r.nodes[n].slots, r.nodes[n].entry) for n in members}
    full = Plan(
        generation=change.generation,
        replaces=change.replaces,
        more=tuple(peers.values()),
        check=check_of(members),
        interrupt=change.interrupt,
        timeout_s=wait_s,
        checkpoints=tuple(checkpoint.path for checkpoint in r.checkpoints.usable()),
        outcome=root.outcome,
    )
    old = dict.fromkeys(r.members)
    delta, more = full, tuple(peer for n, peer in peers.items() if n not in old)
    follows = root.generation and not m.trouble.lists_differ
    if follows and [n for n in old if n in chosen] + [peer.node for peer in more] == members:
        without = tuple(n for n in old if n not in chosen)
        delta = msgspec.structs.replace(full, base=root.generation, without=without, more=more)
    return full, delta


# -- give up ----------------------------------------------------------------------------------------------------------


def burn(m: State, reason: str = "", patience_s: float | None = None) -> None:
    """Give up a generation that is not committed. Its number is never used again; the old generation keeps training."""
    ballot = m.open_ballot
    m.outbox.log("abort", f"generation {ballot.change.generation}: {reason or ballot.spoiled}")
    m.trouble.retry_at = m.watch.now + (ballot.patience_s if patience_s is None else patience_s)
    m.tell(ballot.participants)
    m.ballot = None


def burn_late(m: State) -> None:
    """Give up a planned change, and newcomers that did not vote. Members keep training."""
    late_nodes = [m.roster.nodes[n] for n in sorted(m.open_ballot.awaited)]
    burn(m, f"no vote from {m.roster.names(node.id for node in late_nodes)}", m.timing.retry_s)
    newcomers = [node for node in late_nodes if not node.seat and node.alive]
    losses.eject(m, *(_no_vote(m, node) for node in newcomers if not m.watch.may_reconnect(node.id)))


def burn_reachable(m: State) -> None:
    m.trouble.probe_s *= 2
    burn(m, "its members reach each other: the links are slow, not cut", 0.0)


def await_deserter(m: State) -> None:
    burn(m, f"the script of {m.roster.names(m.deserters())} has ended", 0.0)


def drop_newcomers(m: State) -> None:
    """Give up a planned change, and newcomers with cut links. Members stay: their own generation may still work."""
    ballot = m.open_ballot
    newcomers = frozenset(ballot.change.joined)
    dropped = [n for n in _cut_off(m, ballot, last=newcomers) if n in newcomers]
    named = [
        f"{member_name(n)} does not reach {m.roster.names(refusal.unreachable)}"
        for n, refusal in sorted(ballot.refusals.items())
    ]
    burn(m, "; ".join(named), 0.0 if dropped else m.timing.prepare_s)
    _give_up(m, dropped, ballot)


def drop_cut_off(m: State) -> None:
    """Eject the smallest set of nodes that explains the refusals, and rebuild with the other nodes."""
    ballot = m.open_ballot
    _give_up(m, _cut_off(m, ballot, last=frozenset()), ballot)
    rebuild(m, "links are cut")


def eject_late(m: State) -> None:
    """Eject nodes that did not vote, and rebuild with the other nodes, which wait."""
    late_nodes = [m.roster.nodes[n] for n in sorted(m.open_ballot.awaited)]
    losses.eject(m, *(_no_vote(m, node) for node in late_nodes if node.alive))
    if not m.roster.root.status.ended:
        rebuild(m, "votes are missing")


def _no_vote(m: State, node: Node) -> Overdue:
    """If the node misses its orders, or is not heard itself, silence is the only evidence against it."""
    hears = m.outbox.has_heard(node.id, m.watch.reports.get(node.id))
    return Overdue(node, "did not vote in time", unheard=not hears or m.watch.unheard_s(node.id) > DEAF_S)


def _cut_off(m: State, ballot: Ballot, last: frozenset[int]) -> list[int]:
    """Return nodes to drop so that the remaining ones reach each other. Of equals the youngest goes, `last` first."""
    accusations = {n: refusal.unreachable for n, refusal in ballot.refusals.items()}
    by_age = [*sorted(n for n in ballot.members if n not in last), *sorted(last)]
    return to_drop(accusations, by_age, [n for n in ballot.members if m.has_state(n)])


def _give_up(m: State, nodes: list[int], ballot: Ballot) -> None:
    tried = {
        (n, other): address
        for n, refusal in ballot.refusals.items()
        for other, address in zip(refusal.unreachable, refusal.tried, strict=False)
    }
    for n in nodes:
        accusers = [a for a, refusal in ballot.refusals.items() if n in refusal.unreachable]
        far_nodes = accusers or list(ballot.refusals[n].unreachable)
        far_ends = []
        for other in far_nodes:
            address = tried.get((other, n)) or tried.get((n, other)) or m.roster.nodes[other].entry
            far_ends.append(f"{m.roster.name(other)}, tried {address}")
        reason = f"no connection between it and {'; '.join(far_ends)}"
        losses.eject(m, Overdue(m.roster.nodes[n], reason, FailureKind.UNREACHABLE))


# -- commit -----------------------------------------------------------------------------------------------------------


def commit(m: State) -> None:
    """Make the generation the committed one. The commit is stored before any node learns of it."""
    r, root, ballot = m.roster, m.roster.root, m.open_ballot
    change, chosen = ballot.change, set(ballot.members)
    former = [n for n in r.members if n not in chosen]
    root.old_may_step, root.entered = bool(r.present()) and not change.interrupt, False
    _end_change(m)
    root.generation, root.change = change.generation, change
    lost_nodes = [r.nodes[n] for n in {*r.members, root.first_before} if n in r.nodes and not r.alive(n)]
    root.first_before, root.first = root.first, ballot.members[0] if ballot.members else 0
    r.seat(ballot.members, change.joined)
    m.watch.committed_at, m.trouble.lists_differ = m.watch.now, False
    ballot.awaited = set(ballot.members)
    m.tell(ballot.participants)
    for node in [r.nodes[n] for n in former if r.alive(n) and n not in change.leavers]:
        m.tell([node.id])
        if node.leaving:  # the node was asked to leave while the others continued without it
            losses.dismiss(m, node, Exit.OK, node.leaving)
    for node in lost_nodes:
        losses.forget_if_unneeded(m, node)


def complete(m: State) -> None:
    """Record a change as complete: all members have switched, and all leavers have left."""
    r, root, change = m.roster, m.roster.root, m.open_ballot.change
    m.ballot, root.old_may_step = None, False
    _end_change(m)
    root.discarded += change.discarded
    # Earlier generations may never have become complete. This entry includes their changes.
    before, r.history.members = r.history.members, list(r.members)
    r.mark("history")
    if not change.interrupt:  # after an interrupt, newcomers may repeat a first exchange that did not end
        m.trouble.probe_s = m.timing.probe_s
    old, new = set(before), set(r.members)
    pause = f", pause {change.pause_s:.3f} s" if change.pause_s else ""
    text = f"generation {change.generation}: {change.reason}; {counted(len(r.members), 'node')}{pause}"
    data: dict[str, Any] = {
        "generation": change.generation,
        "joined": {member_name(n): r.nodes[n].host for n in r.members if n not in old},
        "tokens": {member_name(n): r.nodes[n].token for n in r.members if n not in old},
        "left": [member_name(n) for n in before if n not in new],
    }
    if r.members:
        root.status = RunStatus.TRAINING
        if change.generation > root.rollback_below:
            root.complete, root.rollback_below = change.generation, 0
        data |= {"members": len(r.members), "first_step": change.first_step, "pause_s": change.pause_s}
        m.outbox.log(change.kind.value, text, **data)
        m.outbox.instructions.append(
            GenerationReport(
                generation=change.generation,
                kind=change.kind,
                members=[member_name(n) for n in r.members],
                first_step=change.first_step,
                pause_s=change.pause_s or None,
                parts=change.parts,
                bytes_in_pause=change.bytes_in_pause,
                bytes_behind=change.bytes_behind,
                reason=change.reason,
                at=m.at,
                # An earlier head, with another clock, may have begun the change.
                took_s=max(0.0, m.at - change.began_at),
            )
        )
    else:
        root.status = RunStatus.SUSPENDED
        m.outbox.log("suspend", f"{text}; the run goes on from {_resume_point(m)}", **data)
    for n in change.leavers:
        if n in r.nodes:
            losses.forget_if_unneeded(m, r.nodes[n])


def _end_change(m: State) -> None:
    """End the present change: it is complete, or another one takes its place, or nobody is left of it.

    Where its generation began is remembered, so that a checkpoint of an older history is recognized when it turns up. A
    start that was lost before any member reported its first step may have begun with any checkpoint.
    """
    history, change = m.roster.history, m.roster.root.change
    m.roster.root.change = None
    if change is not None and (change.first_step is not None or change.kind is ChangeKind.START):
        history.first_steps = [*history.first_steps, (change.generation, change.first_step or 0)][-MAX_FIRST_STEPS:]
        m.roster.mark("history")


def _resume_point(m: State) -> str:
    """Say where nodes will resume that join a run without members."""
    if m.roster.restarts:
        return "what its script has saved"
    usable = m.roster.checkpoints.usable()
    return f"the checkpoint of step {usable[0].step}" if usable else "its beginning"
