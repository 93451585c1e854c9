"""Losses of nodes and the end of the run: who is to blame, and what depended on the node.

This module only notes losses. The rules in `tables` decide which generation follows.
"""

from signal import SIGTERM

from fallow.core.membership import events as ev
from fallow.core.membership import failures
from fallow.core.membership.failures import DIVERGENCE
from fallow.core.membership.messages import End
from fallow.core.membership.records import Failure, FailureKind, Node
from fallow.core.membership.state import State
from fallow.core.membership.watch import Overdue
from fallow.model import Exit, MemberPhase, RunStatus

_DESERTED = (
    "its script ended ({how}) inside of the run.updates loop while the others go on; all have to leave it in the "
    "same step: decide by run.mean(loss) in the final body or by run.step, not by a member's own loss or rank"
)
_ENV = "env:// rendezvous"
"""Part of the last line of torch's error when init_process_group finds no fixed world."""


def lose(m: State, node: Node, reason: str, phase: MemberPhase = MemberPhase.GONE) -> None:
    """Note that a node has ended, or (SILENT) is given up."""
    r, name, before = m.roster, m.roster.name(node.id), node.phase
    r.touch(node).phase = phase
    node.ended = reason if before is MemberPhase.SILENT else node.ended or reason
    if phase is MemberPhase.GONE and node.seat and r.root.scripted and not r.finishing:
        r.root.limit = max(0, r.root.limit - 1)
    if before is MemberPhase.SILENT:
        return  # the node was given up before, and now its end is proved
    if before is MemberPhase.STARTING:
        if phase is MemberPhase.GONE and not node.leaving:
            _note_early_end(m, node, reason)
        return
    if m.going is not None and node.id in r.leavers and not r.root.old_may_step:
        return  # a member has passed the boundary, so this node had, too
    m.outbox.log("eject", f"{name} is gone: {reason}", node=node.id)
    if not node.seat:
        m.spoil(f"newcomer {name} is gone: {reason}", node.id)
    if m.roster.is_inside(node):
        m.trouble.lost_members[node.id], m.trouble.code = reason, None if node.leaving else node.code


def eject(m: State, *overdue: Overdue) -> None:
    """Give nodes up. A node that is only silent may come back; any other node gets the order to end."""
    for one in overdue:
        node = one.node
        if node.deserted and _deserts(m, node):
            text = _DESERTED.format(how=f"its process did not: {one.reason}")
            if blame(m, node, FailureKind.EXCEPTION, DIVERGENCE + "desertion", text):
                return
        if one.kind is not None:
            blame(m, node, one.kind, one.kind.value, one.reason)
        lose(m, node, one.reason, MemberPhase.SILENT if one.unheard else MemberPhase.GONE)
        if not one.unheard:
            dismiss(m, node, Exit.TEMPFAIL, one.reason, kill=True, stack=one.kind is FailureKind.HANG)


def dismiss(m: State, node: Node, code: Exit, reason: str, *, kill: bool = False, stack: bool = False) -> None:
    """End a node that no generation needs."""
    m.roster.touch(node).phase = MemberPhase.GONE
    node.ended = node.ended or reason
    m.outbox.ends[node.id] = End(code=code, reason=reason, kill=kill, stack=stack)
    m.tell([node.id])


def end_early(m: State, node: Node, event: ev.NodeEnded) -> None:
    """Handle a node whose workers ended before their script did."""
    node.code, kind, signature, reason = event.code, None, "", event.reason
    if node.phase is MemberPhase.STARTING and (event.by_slurm or event.signal == SIGTERM):
        # Slurm's signal reaches a script that does not handle it yet, before the head knows that the node must leave.
        m.outbox.log("eject", f"{m.roster.name(node.id)} is gone: {reason}", node=node.id)
        node.leaving = node.leaving or reason
    if event.signal in failures.CRASHES:
        kind, signature = FailureKind.CRASH, f"signal {event.signal}"
    elif event.code not in (None, Exit.OK, Exit.TEMPFAIL):
        kind, signature = FailureKind.EXCEPTION, f"exit code {event.code}"
    elif event.code == Exit.OK and _deserts(m, node):
        kind, signature = FailureKind.EXCEPTION, DIVERGENCE + "exit code 0"
        reason = _DESERTED.format(how="exit code 0")
    if kind is not None and not node.leaving:
        node.traceback = node.traceback or event.tail
        if kind is FailureKind.EXCEPTION and node.phase is not MemberPhase.STARTING:
            text = f"{m.roster.name(node.id)}: the script ended with exit code {event.code}"
            m.outbox.log("failed", text, node=node.id, code=event.code, step=node.step)
        if blame(m, node, kind, signature, reason):
            return
    lose(m, node, event.reason)


def end_finished(m: State, node: Node, event: ev.NodeEnded) -> None:
    """Handle the end of a node whose script had finished. The main member's exit code decides about the run."""
    r, is_main = m.roster, node.id == m.roster.root.main
    r.touch(node).phase, node.code = MemberPhase.GONE, event.code
    if event.code == Exit.OK:
        return
    name = r.name(node.id)
    if event.code is None:
        node.ended = exit_unknown(m, node, event.reason) if is_main else event.reason
        m.outbox.log("exit", f"{name}: {event.reason}", node=node.id)
        return
    m.outbox.log("failed", f"{name}: its script ended after the training, but {event.reason}", node=node.id)
    if is_main:
        end_run(m, RunStatus.FAILED, f"the main member {name} failed after the training: {event.reason}")


def exit_unknown(m: State, node: Node, why: str) -> str:
    return f"the exit code of the main member {m.roster.name(node.id)} is not known: {why}"


def blame(m: State, node: Node, kind: FailureKind, signature: str, text: str) -> bool:
    """Record a failure. Returns True if the script is to blame, which ends the run."""
    r = m.roster
    failure = Failure(
        node=node.id,
        host=node.host,
        token=node.token,
        kind=kind,
        signature=signature,
        step=node.step,
        text=text,
        at=m.at,
    )
    may_be_the_scripts = node.phase is not MemberPhase.STARTING and not r.finishing
    verdict = failures.verdict(r, failure) if may_be_the_scripts else None
    if verdict is None:
        reason = failures.note(r, failure, m.timing.bar_after)
        if reason:
            bar(m, node.host, reason)
        return False
    m.outbox.log("eject", f"{r.name(node.id)} is gone: {text}", node=node.id)
    dismiss(m, node, Exit.SOFTWARE, text)
    end_run(m, RunStatus.FAILED, verdict, node.traceback)
    return True


def bar(m: State, host: str, reason: str) -> None:
    """Bar the host from the run for a while."""
    failures.bar(m.roster, host, reason, m.at)
    m.outbox.log("bar", f"{host} is barred from this run: {reason}", host=host)
    m.outbox.instructions.append(ev.Barred(host))


def count_start_failure(m: State, what: str, traceback: str = "") -> None:
    """Count a node that failed before its training loop. If no node ever trained and none is left, the run fails."""
    r = m.roster
    r.root.start_failures += 1
    r.root.message, r.root.traceback = r.root.message or what, r.root.traceback or traceback
    if r.root.generation == 0 and not any(
        n.phase in (MemberPhase.STARTING, MemberPhase.READY) for n in r.nodes.values()
    ):
        end_run(m, RunStatus.FAILED, r.root.message, r.root.traceback)


def end_run(m: State, status: RunStatus, message: str, traceback: str = "") -> None:
    """End the run. Every node that has not finished its script gets the order to end."""
    root = m.roster.root
    m.tell([n for n, node in m.roster.nodes.items() if node.alive and not node.finished])
    root.status, root.message, root.traceback, root.change, m.ballot = status, message, traceback, None, None
    m.roster.mark("root")
    m.trouble.lost_members.clear()
    m.outbox.instructions.append(ev.RunEnded(status, message))


def end_without_main(m: State) -> None:
    main = m.roster.nodes[m.roster.root.main]
    text = f"the main member {m.roster.name(main.id)} ended after the training, before its script had"
    end_run(m, RunStatus.FAILED, f"{text}: {main.ended or 'it is gone'}", main.traceback)


def end_well(m: State) -> None:
    main = m.roster.nodes.get(m.roster.root.main)
    if main is not None and not main.exited:
        still_there = f"its process was still there {m.timing.progress_s:g} s after its script had ended"
        m.roster.touch(main).ended = exit_unknown(m, main, still_there if main.alive else main.ended)
        m.outbox.log("exit", main.ended, node=main.id)
    end_run(m, RunStatus.FINISHED, (main.ended if main is not None else "") or m.roster.root.diverged)


def forget_if_unneeded(m: State, node: Node) -> None:
    """Delete the record of a node whose processes have ended and that no generation refers to."""
    root = m.roster.root
    mains = (
        root.main,
        root.first,
        root.first_before,
    )  # the training may turn out to have ended in the previous generation
    is_needed = m.roster.is_inside(node) or node.id in m.participants() or node.id in mains
    if node.exited and node.phase is MemberPhase.GONE and not is_needed:
        m.roster.forget(node)
        m.watch.forget(node.id)
        m.outbox.sent_orders.pop(node.id, None)
        m.outbox.ends.pop(node.id, None)
        m.trouble.attempts.pop(node.id, None)


def _note_early_end(m: State, node: Node, reason: str) -> None:
    name = m.roster.name(node.id)
    what = f"{name} ended before its training loop: {reason}"
    if node.code == Exit.OK:
        what = (
            f"{name}: the script ended without reaching run.updates(); call fallow.init(), run.prepare(...) and loop "
            "over run.updates(loader)"
        )
    elif _ENV in reason:
        what += (
            "; write fallow.init() in the place of torch.distributed's init_process_group: none of its process groups "
            "could follow the membership"
        )
    m.outbox.log("failed", what, node=node.id)
    count_start_failure(m, what, node.traceback)


def _deserts(m: State, node: Node) -> bool:
    """Return True if the script ended without an error in the middle of a training that others continue."""
    r = m.roster
    is_member = node.phase is MemberPhase.MEMBER and not node.leaving and not r.finishing
    return is_member and any(n != node.id for n in r.present(MemberPhase.MEMBER))
