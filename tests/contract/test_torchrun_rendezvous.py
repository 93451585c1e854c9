"""torchrun's rendezvous backend against the real membership machine and rendezvous store, agents as threads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from fallow.core.membership import Membership  # noqa: E402
from fallow.core.roster import Roster  # noqa: E402
from fallow.core.timing import Timing  # noqa: E402
from fallow.head.rendezvous import Rendezvous  # noqa: E402
from torch.distributed import DistStoreError, TCPStore  # noqa: E402
from torch.distributed.elastic.rendezvous import RendezvousInfo  # noqa: E402
from torch.distributed.elastic.utils import store as store_util  # noqa: E402

from fallow.core import events as ev  # noqa: E402
from fallow.model import (  # noqa: E402
    Beat,
    BeatAck,
    Finished,
    FromWorker,
    KvRequest,
    RunStatus,
    ToWorker,
    Welcome,
    WorkerHello,
)
from fallow.worker.session.session import Session  # noqa: E402
from fallow.worker.torchrun.backend import Handler  # noqa: E402

WITHIN_S = 90.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Head:
    """One run's machine and store on a thread; every message goes through its queue, as in the real one."""

    def __init__(self) -> None:
        roster = Roster(run="r", min_members=2, max_members=4, limit=4, scripted=True)
        self.machine = Membership(roster, term=1, timing=Timing(held_grace_s=0.05), at=time.monotonic(), validate=True)
        self.rendezvous = Rendezvous()
        self.say: dict[str, Callable[[ToWorker], None]] = {}
        self.late: Callable[[], bool] | None = None
        "messages that a script has ended wait until this is true"
        self.agents: list[Agent] = []
        self._late: list[FromWorker] = []
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def roster(self) -> Roster:
        return self.machine.roster

    def apply(self, event: ev.Event) -> None:
        self._inbox.put(lambda: self._apply(event))

    def take(self, message: FromWorker) -> None:
        self._inbox.put(lambda: self._take(message))

    def close(self) -> None:
        for agent in self.agents:
            if not agent.link.cut:
                agent.thread.join(WITHIN_S)
        self._inbox.put(None)
        self._thread.join(WITHIN_S)

    def _serve(self) -> None:
        while True:
            try:
                act = self._inbox.get(timeout=0.02)
            except queue.Empty:
                act = lambda: self._apply(ev.Ticked(at=time.monotonic()))  # noqa: E731
            if act is None:
                return
            act()
            self._answer(self.rendezvous.tick(time.monotonic()))
            while self._late and self.late is not None and self.late():
                self._apply(ev.Said(at=time.monotonic(), message=self._late.pop()))

    def _take(self, message: FromWorker) -> None:
        at, worker = time.monotonic(), message.worker if not isinstance(message, KvRequest) else ""
        match message:
            case KvRequest():
                raise AssertionError
            case Finished() if self.late is not None and not self.late():
                self._late.append(message)
                return
            case WorkerHello():
                self.say[worker](
                    Welcome(
                        term=1, run="r", seed=0, max_workers=4, beat_s=0.05, lease_s=9, head_patience_s=9, folder="f"
                    )
                )
        self._apply(ev.Said(at=at, message=message))
        if isinstance(message, Beat):
            self.say[worker](BeatAck(term=1, ready=True))

    def ask(self, worker: str, request: KvRequest) -> None:
        self._inbox.put(lambda: self._answer(self.rendezvous.handle(worker, request, time.monotonic())))

    def _answer(self, replies: list[tuple[str, Any]]) -> None:
        for worker, reply in replies:
            self.say[worker](reply)

    def _apply(self, event: ev.Event) -> None:
        for instruction in self.machine.handle(event):
            if isinstance(instruction, ev.Tell) and instruction.worker in self.say:
                self.say[instruction.worker](instruction.message)


@dataclass
class Link:
    """A worker's end of the wire."""

    head: Head
    worker: str
    cut: bool = False
    last_heard: float = float("inf")

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send(self, message: FromWorker) -> None:
        if self.cut:
            return
        if isinstance(message, KvRequest):
            self.head.ask(self.worker, message)
        else:
            self.head.take(message)


@dataclass
class Agent:
    """What torchrun's agent does, with a script that runs until it is told how to end."""

    head: Head
    number: int
    met: list[RendezvousInfo] = field(default_factory=list)
    exit: BaseException | None = None
    fails: bool = False
    "its script does, as soon as it is started"

    def __post_init__(self) -> None:
        self.name = f"w{self.number}"
        self.head.agents.append(self)
        self.link = Link(self.head, self.name)
        self._ends = threading.Event()

        def connect(on_message: Callable[[ToWorker], None], on_connect: Callable[[], None]) -> Link:
            self.head.say[self.name] = on_message
            return self.link

        self.head.apply(ev.WorkerExpected(at=time.monotonic(), worker=self.name, token=f"t{self.number}", node="n"))
        self.session = Session(self.name, "127.0.0.1", connect, grouped=False)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def world(self) -> tuple[int, int] | None:
        """Rank and size of the script that runs."""
        return (self.met[-1].rank, self.met[-1].world_size) if self.met else None

    def end(self) -> None:
        """The script ends well."""
        self._ends.set()

    def die(self) -> None:
        """The node is lost."""
        self.link.cut = True
        self.head.apply(ev.WorkerGone(at=time.monotonic(), worker=self.name, reason="killed", signal=9))

    def _run(self) -> None:
        try:
            welcome = self.session.open()
            handler = Handler(self.session, welcome.run, welcome.max_workers)
            while not self.link.cut:
                info = handler.next_rendezvous()
                self.met.append(info)
                while not self.fails and not self._ends.is_set() and not handler.num_nodes_waiting():
                    if self.link.cut:
                        return
                    time.sleep(0.005)
                if self._ends.is_set():
                    with contextlib.suppress(DistStoreError):
                        store_util.barrier(info.store, info.world_size, "torchelastic/agent/terminal_state", 2.0)
                    raise SystemExit(0)
        except SystemExit as ended:
            self.exit = ended
            if not self.link.cut:
                gone = ev.WorkerGone(at=time.monotonic(), worker=self.name, reason="ended", code=int(str(ended.code)))
                self.head.apply(gone)
        finally:
            self.session.close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


def worlds(*agents: Agent) -> list[tuple[int, int] | None]:
    return [agent.world for agent in agents]


def test_e1_members_meet_anew_when_one_comes_leaves_or_is_lost(head: Head) -> None:
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    third = Agent(head, 2)
    until(lambda: worlds(first, second, third) == [(0, 3), (1, 3), (2, 3)])
    until(lambda: head.roster.change is None)
    head.apply(ev.ReleaseWanted(at=time.monotonic(), workers=["w0"], reason="asked", limit=2))
    until(lambda: worlds(second, third) == [(0, 2), (1, 2)])
    first.thread.join(WITHIN_S)
    assert isinstance(first.exit, SystemExit)
    assert first.exit.code == 0
    third.die()
    until(lambda: worlds(second) == [(0, 1)])
    second.end()
    until(lambda: head.roster.status is RunStatus.FINISHED)


def test_e1_agents_share_a_store_and_scripts_one_that_listens_on_the_nodes_address_alone(head: Head) -> None:
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    mine, others = first.met[0].store, second.met[0].store
    mine.set("a", "1")
    mine.multi_set(["b", "c"], ["2", "3"])
    assert others.get("a") == b"1"
    assert others.multi_get(["b", "c"]) == [b"2", b"3"]
    assert [mine.add("n", 1), others.add("n", 2), mine.add("n", 1)] == [1, 3, 4]
    with pytest.raises(DistStoreError, match="did not come"):
        mine.wait(["nothing"], timedelta(seconds=0.1))
    told = [agent.met[0].bootstrap_store_info for agent in (first, second)]
    assert told[0] == told[1]
    assert told[0] is not None
    assert told[0].master_addr == "127.0.0.1"
    listening = [
        c.laddr for c in psutil.Process().net_connections() if c.laddr.port == told[0].master_port and not c.raddr
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    TCPStore(told[0].master_addr, told[0].master_port, is_master=False).set("script", "here")
    second.die()
    with pytest.raises(DistStoreError, match="over"):
        mine.wait(["never"])
    first.end()
    until(lambda: head.roster.status is RunStatus.FINISHED)


def test_e1_a_script_that_fails_again_and_again_ends_the_run(head: Head) -> None:
    agents = [Agent(head, 0, fails=True), Agent(head, 1, fails=True)]
    until(lambda: head.roster.status is RunStatus.FAILED)
    assert "4 times in a row with the same members" in head.roster.message
    for agent in agents:
        agent.thread.join(WITHIN_S)
        assert [info.world_size for info in agent.met[:5]].count(2) == 4


def test_e1_e10_a_script_that_ends_while_a_change_is_on_its_way_is_not_waited_for(head: Head) -> None:
    """Its end is told just after the head has committed a generation with it: the others go on in that one alone."""
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    until(lambda: head.roster.change is None)
    head.late = lambda: head.roster.generation == 2
    first.end()
    third = Agent(head, 2)
    until(lambda: worlds(second, third) == [(0, 2), (1, 2)])
    assert head.roster.members == ["w0", "w1", "w2"]
    second.end()
    third.end()
    until(lambda: head.roster.status is RunStatus.FINISHED)
    first.thread.join(WITHIN_S)
    assert first.exit is not None


def test_e1_e10_a_script_that_fails_when_another_has_ended_well_is_not_started_again(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    first.end()
    until(lambda: head.roster.finishing)
    second.fails = True
    until(lambda: head.roster.status is RunStatus.FINISHED)
    assert isinstance(second.exit, SystemExit)
    assert second.exit.code == 1
    assert "when others' scripts had ended well" in capsys.readouterr().err
