"""Actions of the table `tables.NODE`: note the facts in a node's report.

The rules of `tables.RUN` decide which generation follows from the facts.
"""

from fallow.core.membership import events as ev
from fallow.core.membership import losses
from fallow.core.membership.messages import Checkpoint, Report
from fallow.core.membership.moves import burn
from fallow.core.membership.records import FailureKind, Node, Saved
from fallow.core.membership.state import Broken, State
from fallow.model import ChangeKind, Exit, MemberPhase, RunStatus

_LEFT_ALONE = "its node goes away, and it heard no head"


def recover(m: State, report: Report, host: str) -> None:
    """Continue above a generation number that a node on `host` reports and that the store has lost."""
    root, voting, node = m.roster.root, m.voting, m.roster.nodes.get(report.node)
    newest = max(report.highest, report.generation, report.prepared, report.given_up)
    if newest > root.highest:
        root.highest = newest
        m.roster.mark("root")
    if voting is not None:
        number = voting.change.generation
        is_asked = node is not None and node.host == host and node.id in voting.participants
        # A node outside of the ballot got that number from another head, and no member computes in it yet.
        if newest > number or report.generation == number or (report.highest == number and not is_asked):
            m.spoil("the store has lost what was written last")
    if report.generation > max(root.generation, m.trouble.broken):
        m.trouble.broken = root.recovered = report.generation
        m.roster.mark("root")
        m.outbox.log(
            "recover", f"{m.roster.name(report.node)} is in generation {report.generation}, which the store lost"
        )


def resend(m: State, node: Node, report: Report) -> None:
    """Repeat the newest order of a node that has not obeyed it, at most every `resend_s`."""
    _, at = m.outbox.sent_orders.get(node.id, (0, -m.timing.resend_s))
    if m.watch.now - at >= m.timing.resend_s:
        m.tell([node.id])


def take_back(m: State, node: Node, report: Report) -> None:
    """Take back a node that was only silent. It is a member again unless a generation without it was committed."""
    r, text = m.roster, f"{m.roster.name(node.id)} is heard again"
    r.touch(node).ended = ""
    if node.seat:
        node.phase = MemberPhase.LEAVING if node.leaving else MemberPhase.MEMBER
        m.trouble.lost_members.pop(node.id, None)
        if r.root.status is RunStatus.SUSPENDED:
            r.root.status = RunStatus.TRAINING
        m.spoil(text)
    elif node.leaving:
        losses.dismiss(m, node, Exit.OK, node.leaving or _LEFT_ALONE)
    else:
        node.phase = MemberPhase.READY if node.accepted else MemberPhase.STARTING
    m.tell([node.id])
    m.outbox.log("back", f"{text}: {node.phase}", node=node.id, phase=node.phase)


def note_progress(m: State, node: Node, report: Report) -> None:
    """Note the node's step, and log what people want to know about the node."""
    r, name = m.roster, m.roster.name(node.id)
    if r.is_inside(node) and not r.root.rollback_below:
        node.step = max(node.step, report.step)
    if report.healed > node.healed:
        r.touch(node).healed = report.healed
        m.outbox.log(
            "healed",
            f"{name}: its weights were not those of most members at step {report.healed}; it has received theirs. Does "
            "this node compute differently?",
            node=node.id,
            step=report.healed,
        )
    if (report.unrecorded is None) is not (node.unrecorded is None):
        r.touch(node).unrecorded = report.unrecorded
        text = "cannot write down which samples it uses: its file system is full or hangs"
        if report.unrecorded is None:
            text = "writes down again which samples it uses"
        m.outbox.log("ledger", f"{name} {text}", node=node.id)


def note_saved(m: State, node: Node, report: Report) -> None:
    r, new = m.roster, report.saved
    if new is None or new.path == node.noted:
        return
    r.touch(node).noted = new.path
    m.tell([node.id])
    keep_checkpoint(m, new)


def keep_checkpoint(m: State, new: Checkpoint) -> None:
    """Record a checkpoint that is complete on disk, and remove checkpoints that are no longer needed."""
    r, checkpoints = m.roster, m.roster.checkpoints
    if any(saved.checkpoint.path == new.path for saved in checkpoints.saved):
        return
    if new.generation == r.root.generation:
        _note_entered(m)
    elif new.generation > r.root.highest:  # a store that went back in time has lost that number
        r.root.highest = new.generation
        r.mark("root")
        if m.voting is not None:
            m.spoil(f"the checkpoint of step {new.step} has a generation that the store has lost")
    saved = Saved(checkpoint=new, aside=_is_superseded(m, new))
    checkpoints.saved.append(saved)
    r.root.unsaved_reason = ""
    r.mark("checkpoints")
    voters = m.voting.members if m.voting is not None else []
    if saved.usable and voters and not any(map(m.has_state, voters)):
        m.spoil(f"the checkpoint of step {new.step} has turned up")
    text = f"checkpoint of step {new.step}" + (": set aside, the run went on from an earlier step" * saved.aside)
    m.outbox.log(
        "checkpoint",
        text,
        generation=new.generation,
        step=new.step,
        path=new.path,
        nbytes=new.nbytes,
        took_s=new.took_s,
    )
    if any(map(m.has_state, r.present())):  # otherwise members may be loading one of the checkpoints
        m.outbox.instructions += [ev.RemoveCheckpoint(path) for path in checkpoints.take_spare(m.keep)]


def _is_superseded(m: State, new: Checkpoint) -> bool:
    """Return True if a later generation than the checkpoint's has begun before its step."""
    r, change = m.roster, m.roster.root.change
    begun = r.history.first_steps + [(rollback.generation, rollback.to_step) for rollback in r.history.rollbacks]
    if change is not None and r.members:
        goes_on = change.kind is not ChangeKind.START and any(map(m.has_state, r.members))
        if change.first_step is not None or not goes_on:
            # Without a state, the members of the change begin with an earlier checkpoint.
            begun.append((change.generation, change.first_step or 0))
    return any(generation > new.generation and first < new.step for generation, first in begun)


def note_unsaved(m: State, node: Node, report: Report) -> None:
    r, problem = m.roster, report.unsaved
    if problem is None or (problem.generation, problem.step) <= r.root.unsaved:
        return
    r.root.unsaved, r.root.unsaved_reason = (problem.generation, problem.step), problem.reason
    r.mark("root")
    m.tell(r.present())
    m.outbox.log("checkpoint", problem.reason, node=node.id, failed=True)


def note_damaged(m: State, node: Node, report: Report) -> None:
    r, problem = m.roster, report.damaged
    assert problem is not None
    damaged = [one for one in r.checkpoints.saved if one.checkpoint.path == problem.path and not one.problem]
    if not damaged:
        return
    damaged[0].problem = problem.reason
    r.mark("checkpoints")
    usable = r.checkpoints.usable()
    then = f"that of step {usable[0].step} is used" if usable else "no older one is left"
    m.outbox.log("damaged", f"{problem.reason}; {then}", path=problem.path, node=node.id)
    if not usable and not any(map(m.has_state, r.present())):
        # The run must not silently begin anew: the user may have a good copy.
        advice = "Put a good copy in its place and submit the run again, or begin anew"
        losses.end_run(m, RunStatus.FAILED, f"{problem.reason}; no older checkpoint is left. {advice}")


def note_ready(m: State, node: Node, report: Report) -> None:
    r, contract = m.roster, report.ready
    assert contract is not None
    r.root.contract = r.root.contract or contract
    problem = r.root.contract.difference(contract)
    if problem:
        message = f"{r.name(node.id)} was refused: {problem}"
        m.outbox.log("refuse", message, node=node.id)
        losses.dismiss(m, node, Exit.DATA, message)
        losses.count_start_failure(m, message)
        return
    r.touch(node).phase, node.accepted = MemberPhase.READY, True
    r.root.start_failures, r.root.message, r.root.traceback = 0, "", ""
    m.tell([node.id])


def note_fault(m: State, node: Node, report: Report) -> None:
    fault = report.fault
    assert fault is not None
    text = f"{m.roster.name(node.id)}: {fault.message}"
    m.outbox.log("failed", text, node=node.id, code=fault.code, step=fault.step, traceback=fault.traceback)
    node.traceback, node.code, node.step = fault.traceback, fault.code, max(node.step, fault.step)
    # The processes end after this report, so they finish no more step.
    m.roster.touch(node).proved_gone = True
    recorded, new = m.roster.root.outcome, fault.outcome
    if new is not None and (recorded is None or (new.generation, new.agreed) > (recorded.generation, recorded.agreed)):
        m.roster.root.outcome = new  # members that still wait for this exchange must not repeat it
    signature = fault.signature or f"exit code {fault.code}"
    is_failure = fault.code != Exit.TEMPFAIL
    if is_failure and losses.blame(m, node, FailureKind.EXCEPTION, signature, fault.message):
        return
    losses.lose(m, node, fault.message)


def note_deserted(m: State, node: Node, report: Report) -> None:
    """Note that the script ended early. The machine waits for its exit code, at most for the lease."""
    if not node.deserted:
        m.roster.touch(node).deserted, node.step = True, max(node.step, report.step)
        m.deserted.add(node.id)


def note_finished(m: State, node: Node, report: Report) -> None:
    r, root, new = m.roster, m.roster.root, report.finish
    if new is None or node.finished or not r.is_inside(node):
        return
    r.touch(node).finished, node.step = True, new.steps
    m.watch.over_s(node.id)
    if root.final is None:
        root.final = new
        root.main = root.first if new.generation == root.generation else root.first_before
        if m.voting is not None:
            burn(m, "the training is finished")
        m.tell(r.present())
    elif root.final.digest != new.digest:
        root.diverged = (
            f"members disagree on the final state: {r.name(node.id)} has {new.digest[:12]}, another one "
            f"{root.final.digest[:12]}: the script trains outside of run.updates, or their nodes compute differently"
        )
        m.outbox.log("diverged", root.diverged)


def note_left(m: State, node: Node, report: Report) -> None:
    """Note that the node has passed the boundary behind which it is no member."""
    node.proved_gone = True
    # A node that was given up as silent has left by itself, as in `note_left_alone`.
    losses.dismiss(m, node, Exit.OK, node.leaving or _LEFT_ALONE)
    # A leaver of an earlier change proves nothing about the present generation.
    m.roster.root.old_may_step &= not m.roster.is_inside(node)


def note_left_alone(m: State, node: Node, report: Report) -> None:
    """Note that a member left by itself: its node goes away, and it heard no head that could have released it."""
    m.roster.touch(node).proved_gone = True
    node.leaving = node.leaving or "its node goes away"
    losses.lose(m, node, _LEFT_ALONE)


def note_refusal(m: State, node: Node, report: Report) -> None:
    ballot, refusal, name = m.open_ballot, report.refusal, m.roster.name(node.id)
    assert refusal is not None
    if set(refusal.unreachable) & set(ballot.members):
        ballot.refusals[node.id] = refusal
        if ballot.refused_at is None:
            ballot.refused_at = m.watch.now
    elif ballot.change.interrupt:
        m.trouble.lists_differ = True
        _note_break(m, node, report, f"{name} could not: {refusal.reason}")
    elif not ballot.spoiled:
        ballot.spoiled, ballot.patience_s = f"{name} could not: {refusal.reason}", m.timing.retry_s
        m.trouble.lists_differ = node.seat > 0
        if not node.seat and node.phase is MemberPhase.READY:
            m.outbox.log("dismiss", f"{name}: its group could not be built: {refusal.reason}", node=node.id)
            losses.dismiss(m, node, Exit.TEMPFAIL, f"its group could not be built: {refusal.reason}")


def note_arrival(m: State, node: Node, report: Report) -> None:
    """Note that a member computes in the committed generation, so all members have passed the boundary."""
    ballot, switch = m.open_ballot, report.switch
    ballot.awaited.discard(node.id)
    change = ballot.change
    _note_entered(m)
    if switch is not None and switch.generation == change.generation:
        change.first_step = switch.first_step
        change.bytes_in_pause += switch.bytes_in_pause
        change.bytes_behind += switch.bytes_behind
        change.discarded = max(change.discarded, switch.discarded)
        if switch.pause_s > change.pause_s:
            change.pause_s, change.parts = switch.pause_s, switch.parts


def _note_entered(m: State) -> None:
    """Note that a member computes in the committed generation: what a leaver holds is too old from now on."""
    root = m.roster.root
    if not root.entered:
        root.old_may_step, root.entered = False, True
        m.roster.mark("root")


def note_broken_group(m: State, node: Node, report: Report) -> None:
    text = f"{m.roster.name(node.id)} has lost its group" + f": {report.break_reason}" * bool(report.break_reason)
    _note_break(m, node, report, text)


def _note_break(m: State, node: Node, report: Report, text: str) -> None:
    """Note that a group broke on this node. The wait before the rebuild doubles with each break at the same step."""
    if m.trouble.group is None:
        wait_s = m.timing.held_grace_s * 2 ** m.trouble.times(node.id, report.step)
        m.trouble.group = Broken(node.id, report.step, text, m.watch.now + wait_s)
