"""What a worker says of itself while it goes from one generation to the next, and how it waits for that."""

import errno
import threading
import time
from typing import Any

import pytest

from fallow.core.membership.messages import Checkpoint, Contract, Finish, Outcome
from fallow.core.protocol import BeatReply
from fallow.model import Doing, Exit, FallowError
from fallow.worker.session.head_status import HEAD_SILENT_S
from fallow.worker.session.orders import Answered, Dismissed, OthersEnded, exit_code
from fallow.worker.session.status import Progress
from fallow.worker.transport.group import Group
from fallow.worker.transport.groups import LinkLoad
from scripted_agent import Agent, plan

CONTRACT = Contract(signature="s", shards=1, global_batch=1)


def never() -> bool:
    """There is nothing to do meanwhile."""
    return False


def member(**known: Any) -> tuple[Agent, Group]:
    """A worker in generation 1, alone, and its group."""
    agent = Agent(**known)
    agent.commit(plan(1, 1))
    group = agent.session.await_commit(never).group
    return agent, group


def test_a_member_whose_group_broke_gives_that_generation_up_and_no_other() -> None:
    agent, _ = member()
    agent.session.hold(1, "connection reset")
    assert (agent.status.given_up, agent.status.break_reason) == (1, "connection reset")
    agent.commit(plan(2, 1, interrupt=True))
    agent.session.await_commit(never)
    assert agent.status.given_up == 1
    assert not agent.session.orders.is_superseded
    agent.order(None, committed=2, broken=2)
    agent.session.hold(2, "the head has given it up")
    assert (agent.status.given_up, agent.status.break_reason) == (2, "connection reset"), "that is no news"


def test_a_worker_without_a_file_descriptor_left_is_heard_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(LinkLoad, "measure", measure)
    agent = Agent(beat_s=0.001)
    agent.session.progress.step = 7
    agent.until(lambda status: status.step == 7)
    agent.session.close()


def test_a_plan_that_interrupts_ends_what_goes_on_in_the_generation_before() -> None:
    agent, group = member()
    agent.order(plan(2, 1))
    assert group.broken is None, "a planned one lets it train on"
    agent.order(plan(3, 1, replaces=1, interrupt=True))
    assert group.broken is not None
    assert agent.status.given_up == 1
    agent.commit(plan(4, 1), broken=4)
    group = agent.session.await_commit(never).group
    assert group.broken is not None, "it was given up before it was taken"


def test_who_hears_the_answer_of_a_member_that_is_gone_goes_on_with_it_and_takes_the_generation_later() -> None:
    agent = Agent()
    agent.session.progress.move(in_loop=False)
    planned = plan(2, 1, interrupt=True, outcome=Outcome(generation=1, agreed=3, answer=0.5))
    agent.commit(planned)
    with pytest.raises(Answered) as answered:
        agent.session.await_commit(never, lambda upcoming: upcoming.plan == planned)
    assert (answered.value.agreed, answered.value.answer) == (3, 0.5)
    agent.session.say(in_call=False)
    assert agent.status.doing is Doing.OUTSIDE
    assert agent.session.await_commit(never).generation == 2


def test_a_contract_is_said_until_it_is_accepted_and_again_if_that_was_forgotten() -> None:
    agent = Agent()
    agent.session.announce(CONTRACT)
    assert agent.status.ready == CONTRACT
    agent.order(accepted=True)
    assert agent.status.ready is None
    agent.order(accepted=False)
    assert agent.status.ready == CONTRACT


def test_a_status_that_does_not_know_of_a_vote_is_not_sent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote may be the last one: to a head that has committed by then, this member would seem to have missed it."""
    agent = Agent()
    order = threading.Thread(target=agent.order, args=(plan(2, 1, interrupt=True),))
    doing = Progress.doing

    def slowly(progress: Progress, *args: Any) -> tuple[Doing, float]:
        """While the status is made, all that a vote needs comes to pass, as far as it can."""
        if not order.ident:
            order.start()
            order.join(0.2)
        return doing(progress, *args)

    monkeypatch.setattr(Progress, "doing", slowly)
    agent.session.say(healed=7)
    agent.until(lambda status: status.prepared == 2)
    order.join()
    prepared = [status.prepared for status in agent.statuses]
    assert prepared == sorted(prepared)
    assert all(status.healed == 7 for status in agent.statuses)


def test_a_member_leaves_without_the_head_only_where_its_node_goes_away_and_the_head_is_silent() -> None:
    agent = Agent()
    news = agent.session.head_status
    agent.silent(HEAD_SILENT_S + 1.0)
    assert not news.leaves_alone(30.0), "its node stays"
    agent.say(BeatReply(term=1, ends_in_s=25.0))
    assert news.leaves_alone(30.0)
    assert not news.leaves_alone(10.0), "there is time"
    news.warn()
    assert news.leaves_alone(10.0)
    agent.silent(0.0)
    assert not news.leaves_alone(30.0), "the head releases it"


def test_a_head_that_was_replaced_says_nothing_any_more() -> None:
    agent = Agent()
    agent.say(BeatReply(term=3, joins=True, reached=(1, 7), checkpoint_in_s=60.0))
    agent.say(BeatReply(term=2))
    assert (agent.session.head_status.last_reply.joins, agent.session.head_status.last_reply.reached) == (True, (1, 7))
    due_at = agent.session.head_status.checkpoint_due_at
    assert 50.0 < due_at - time.monotonic() <= 60.0
    agent.say(BeatReply(term=3, joins=False))
    assert not agent.session.head_status.last_reply.joins
    assert agent.session.head_status.checkpoint_due_at == due_at, "not known is no news"


def test_siblings_rehearse_together_or_not_at_all_though_one_comes_to_its_loop_when_others_have_begun() -> None:
    """The agent sends the first reply to all workers of the node when it starts them."""
    for slots, rehearses in ((1, True), (2, False)):
        agent = Agent(slots=slots)
        agent.say(BeatReply(term=1, joins=True, step=7))
        assert agent.session.head_status.last_reply.joins
        assert agent.session.head_status.rehearsal_reply.joins is rehearses


def test_a_worker_with_infinite_patience_waits_for_a_silent_head_and_another_one_gives_up() -> None:
    """The former are those of a base job: what ends the wait is a head, or Slurm."""
    agent = Agent(patience_s=float("inf"))
    agent.silent(1e6)
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            agent.commit(plan(2, 1, interrupt=True))
        return looks < 3

    assert agent.session.await_commit(look).generation == 2
    other = Agent(patience_s=0.2)
    other.silent(1e6)
    with pytest.raises(FallowError, match="worker n0: the head was silent for"):
        other.session.await_commit(never)


@pytest.mark.parametrize(("code", "known"), [(0, Exit.OK), (75, Exit.TEMPFAIL), (3, Exit.SOFTWARE)])
def test_a_worker_that_is_told_to_end_waits_no_longer_and_its_group_is_interrupted(code: int, known: Exit) -> None:
    agent, group = member()
    agent.end(code, "the run is over")
    assert group.broken == "the run is over"
    assert agent.session.orders.newest_order.end is not None
    with pytest.raises(Dismissed) as dismissed:
        agent.session.await_commit(never)
    assert (dismissed.value.code, dismissed.value.reason) == (code, "the run is over")
    assert exit_code(code) is known


def test_a_member_whose_others_have_finished_ends_if_it_waits_for_them_and_else_not() -> None:
    (agent, _), finish = member(beat_s=0.02), Finish(generation=1, steps=9, digest="d", agreed=4, answer=0.5)
    agent.order(None, committed=1, finish=finish)
    agent.session.progress.moved_at -= 100.0
    beats = len(agent.statuses) + 3
    agent.until(lambda status: len(agent.statuses) >= beats)
    assert agent.status.given_up == 0, "it is busy with something else"
    agent.session.hold(1, "they have ended")
    with pytest.raises(OthersEnded) as ended:
        agent.session.await_commit(never)
    assert (ended.value.agreed, ended.value.answer) == (4, 0.5)
    agent.session.close()


def test_checkpoints_are_said_until_they_are_noted_the_newest_first() -> None:
    agent = Agent()
    for step in (5, 9):
        agent.session.say(saved=Checkpoint(path=f"/c{step}", generation=1, step=step))
    assert agent.status.saved == Checkpoint(path="/c9", generation=1, step=9)
    agent.order(noted="/c9")
    assert agent.status.saved == Checkpoint(path="/c5", generation=1, step=5)
    agent.order(noted="/c5")
    assert agent.status.saved is None


def test_only_the_first_worker_of_a_node_is_the_main_one() -> None:
    for slot, is_main in ((0, True), (1, False)):
        agent = Agent(slot=slot, slots=2)
        agent.order(is_main=True)
        assert agent.session.is_main is is_main
        agent.order(is_main=False)
        assert not agent.session.is_main


def test_a_worker_that_leaves_says_up_to_where_it_was_a_member() -> None:
    agent, _ = member()
    agent.commit(plan(2, leave=True))
    assert agent.session.await_commit(never).group is None
    agent.session.leave(1, 2)
    assert (agent.status.passed_boundary, agent.status.given_up) == (2, 1)
