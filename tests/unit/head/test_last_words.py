"""What an agent says as it ends may be lost with its connection: that costs time, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from builders import cluster, job, node
from fallow.config import Config, Membership
from fallow.core.accounting.backoff import Backoff
from fallow.core.accounting.cancelled import awaits_verdict
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.head.loop.turn import Turn
from fallow.head.slurm import jobs
from fallow.model import AllocationKind, AllocationState, Exit
from runs import hold, new_book, new_run
from talk import CONTRACT, Played, Talk, settle


class Told(NamedTuple):
    """Which of its last words the head hears."""

    ended: bool
    "how its workers have ended"
    left: bool
    "that it ends"


class Scene:
    """Two nodes of a run that train, of which one goes; Slurm shows their jobs."""

    def __init__(self, folder: Path, told: Told, kind: AllocationKind) -> None:
        self.talk, self.told = Talk(new_book(folder, Config(membership=Membership(lease_s=10.0)))), told
        self.run = new_run(self.talk.book, max_nodes=2)
        self.stays, self.goes = self.come("h1", AllocationKind.HARVEST), self.come("h2", kind)
        for one in (self.stays, self.goes):
            one.beat(ready=CONTRACT)
        settle(self.run, self.stays, self.goes)
        self.gone = self.allocation(self.goes)

    def come(self, host: str, kind: AllocationKind) -> Played:
        made = hold(self.talk.turn, self.run, host, kind=kind, job_id=f"job-{host}", sent_by=self.talk.now)
        return self.talk.play(self.run, made, host, job_id=f"job-{host}").greet()

    def allocation(self, agent: Played) -> Allocation:
        return self.run.allocations[agent.hello.token]

    def say_last(self, code: int, **how: Any) -> None:
        """Its workers end, and so does the agent, whose connection may be gone."""
        if self.told.ended:
            self.goes.end(code, **how)
        if self.told.left:
            self.goes.leave(code)

    def poll(self, state: str = "COMPLETED") -> None:
        """Slurm shows that the job of the node that goes is over."""
        self.talk.pass_s(5.0)
        turn = self.talk.turn = Turn(self.talk.book, self.talk.at, self.talk.now)
        of = {self.stays: "RUNNING", self.goes: state}
        shown = [
            job(
                self.allocation(agent).job_id or "",
                word,
                name=agent.hello.token,
                comment=agent.hello.token,
                nodes=[agent.hello.host],
                submit_at=turn.now - 60.0,
                start_at=turn.now - 50.0,
                end_at=turn.now + (60.0 if word == "RUNNING" else -1.0),
            )
            for agent, word in of.items()
        ]
        jobs.take_in(turn, cluster([node("h1"), node("h2")], shown, at=turn.now), Backoff())
        jobs.sweep(turn, cluster([node("h1"), node("h2")], shown, at=turn.now))
        assert not turn.failures
        self.talk.deliver()

    def outcome(self) -> dict[str, Any]:
        """How things stand for all that is decided later: who trains, what is held, whom to blame, what to ask for."""
        run, gone = self.run, self.gone
        known = run.roster.nodes.get(self.goes.node)
        return {
            "members": (run.roster.members, run.root.status, run.root.message),
            "node": known if known is None else (known.phase, known.proved_gone, known.exited, known.seat),
            "allocation": (gone.state, gone.hosts, gone.is_settled, gone.slurm_state, gone.is_elected),
            "may speak": self.talk.book.is_allowed(gone.public_key),
            "blame": (run.failures, run.record.cancelled, run.record.base_wanted, run.roster.failures.failures),
            "asks": awaits_verdict(gone, self.talk.now),
            "scancel": self.talk.turn.cancels,
        }


def given_back(scene: Scene) -> None:
    """It has passed the boundary, and its job ends."""
    scene.talk.turn.release_allocation(scene.run, scene.gone, "somebody waits")
    scene.talk.tick()
    settle(scene.run, scene.stays, scene.goes)
    scene.say_last(Exit.OK, is_ordered=True)
    scene.talk.tick()
    scene.poll()


def cut_off(scene: Scene) -> None:
    """What had started it is gone, as where Slurm kills a job at its limit: the others go on without it."""
    scene.say_last(Exit.TEMPFAIL)
    scene.stays.beat(given_up=scene.run.root.generation)
    settle_the_rest(scene)
    scene.poll("TIMEOUT")
    settle_the_rest(scene)


def the_run_ends(scene: Scene) -> None:
    """It was cancelled while the node trained."""
    scene.talk.turn.apply(scene.run, ev.Cancel(at=scene.talk.at, reason="by hand"))
    scene.talk.deliver()
    scene.say_last(Exit.NO_RESTART, is_ordered=True)
    scene.talk.tick()
    scene.poll()


def settle_the_rest(scene: Scene) -> None:
    for _ in range(3):
        scene.talk.tick(1.0)
        scene.stays.beat()
        if scene.run.machine.ballot is not None and scene.goes.node not in scene.run.machine.participants():
            settle(scene.run, scene.stays)


@pytest.mark.parametrize("kind", [AllocationKind.HARVEST, AllocationKind.BASE])
@pytest.mark.parametrize("story", [given_back, cut_off, the_run_ends])
def test_nothing_but_time_depends_on_what_an_agent_says_last(
    tmp_path: Path, story: Callable[[Scene], None], kind: AllocationKind
) -> None:
    outcomes = []
    for number, told in enumerate([Told(True, True), Told(True, False), Told(False, True), Told(False, False)]):
        scene = Scene(tmp_path / str(number), told, kind)
        story(scene)
        outcomes.append(scene.outcome())
    first, *others = outcomes
    assert first["allocation"][:2] == (AllocationState.ENDED, [])
    assert others == [first] * 3


def test_a_run_counts_on_a_node_until_slurm_shows_its_end_where_its_agent_could_not_say_so(tmp_path: Path) -> None:
    """This is what such words are for."""
    for left in (True, False):
        scene = Scene(tmp_path / str(left), Told(False, left), AllocationKind.HARVEST)
        scene.say_last(Exit.TEMPFAIL)
        scene.talk.tick()
        assert scene.gone.is_live is not left
        assert (scene.gone.state is AllocationState.ENDED) is left
