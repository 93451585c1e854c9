"""torchrun's rendezvous backend against the real membership machine and its gathers, agents as threads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from torch.distributed import DistStoreError, TCPStore  # noqa: E402
from torch.distributed.elastic.rendezvous import RendezvousInfo  # noqa: E402
from torch.distributed.elastic.utils import store as store_util  # noqa: E402

from fallow.core.nodes import events as ev  # noqa: E402
from fallow.core.nodes.gather import Gathers  # noqa: E402
from fallow.core.nodes.machine import Machine  # noqa: E402
from fallow.core.nodes.messages import Gather, Report  # noqa: E402
from fallow.core.nodes.records import Root  # noqa: E402
from fallow.core.nodes.roster import Roster  # noqa: E402
from fallow.core.nodes.watch import Timing  # noqa: E402
from fallow.core.protocol.agents import News, Setup  # noqa: E402
from fallow.core.protocol.workers import FromWorker, Heard, Part, Start, Status, ToWorker  # noqa: E402
from fallow.model import RunStatus  # noqa: E402
from fallow.worker.session.session import Session  # noqa: E402
from fallow.worker.torchrun.backend import Handler  # noqa: E402

WITHIN_S = 90.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Head:
    """One run's machine and gathers on a thread; every message goes through its queue, as in the real one."""

    def __init__(self) -> None:
        roster = Roster(Root(run="r", minimum=2, maximum=4, limit=4, scripted=True))
        self.machine = Machine(roster, term=1, timing=Timing(held_grace_s=0.05), at=time.monotonic(), validate=True)
        self.gathers = Gathers()
        self.say: dict[int, Callable[[ToWorker], None]] = {}
        "by node"
        self.late: Callable[[], bool] | None = None
        "statuses that tell that a script has ended wait until this is true"
        self.agents: list[Agent] = []
        self._late: list[Report] = []
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def status(self) -> RunStatus:
        return self.machine.roster.root.status

    @property
    def members(self) -> list[int]:
        return self.machine.roster.members

    @property
    def changes(self) -> bool:
        """A generation is on its way."""
        return self.machine.roster.root.change is not None

    def apply(self, event: ev.Event) -> None:
        self._inbox.put(lambda: self._apply(event))

    def take(self, report: Report) -> None:
        self._inbox.put(lambda: self._take(report))

    def gather(self, said: Gather) -> None:
        self._inbox.put(lambda: self._gather(said))

    def close(self) -> None:
        for agent in self.agents:
            if not agent.cut:
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
            while self._late and self.late is not None and self.late():
                self._report(self._late.pop(0))

    def _take(self, report: Report) -> None:
        if report.finish is not None and self.late is not None and not self.late():
            self._late.append(report)
        else:
            self._report(report)
        self.say[report.node](Heard(silent_s=0.0))

    def _report(self, report: Report) -> None:
        self._apply(ev.Reported(at=time.monotonic(), host=f"h{report.node}", report=report))

    def _gather(self, said: Gather) -> None:
        answer, nodes = self.gathers.take(said)
        for node in nodes:
            assert answer is not None
            self.say[node](answer)

    def _apply(self, event: ev.Event) -> None:
        for instruction in self.machine.handle(event).then:
            if isinstance(instruction, ev.Send) and instruction.node in self.say:
                plan, ballot = instruction.order.plan, self.machine.state.ballot
                if plan is not None and ballot is not None:
                    self.gathers.open(plan.generation, ballot.members)
                self.say[instruction.node](instruction.order)


@dataclass
class Agent:
    """A node with one worker, which is torchrun's agent; its script runs until it is told how to end."""

    head: Head
    number: int
    met: list[RendezvousInfo] = field(default_factory=list)
    exit: BaseException | None = None
    fails: bool = False
    "its script does, as soon as it is started"
    cut: bool = False
    "nothing of it reaches the head"

    def __post_init__(self) -> None:
        self.node = self.number + 1
        self.head.agents.append(self)
        self._seq = 0
        self._status: Status | None = None
        self._ends = threading.Event()
        self.session = Session(self._connect, grouped=False)
        self.session.open()
        host, token = f"h{self.node}", f"t{self.number}"
        self.head.apply(
            ev.Expected(at=time.monotonic(), host=host, token=token, boot=1, slots=1, entry="127.0.0.1", node=self.node)
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    # -- as the channel to Fallow's agent

    def _connect(self, on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> Agent:
        self.head.say[self.node] = on_message
        return self

    def start(self) -> None:
        setup = Setup(
            run="r",
            folder="f",
            seed=0,
            max_workers=4,
            beat_s=0.05,
            lease_s=9.0,
            patience_s=9.0,
            checkpoint_folder="f",
        )
        say = self.head.say[self.node]
        say(Start(worker=f"n{self.number}", node=self.node, slot=0, slots=1, address="127.0.0.1", setup=setup))
        say(News(term=1))

    def send(self, message: FromWorker) -> None:
        if self.cut:
            return
        if isinstance(message, Part):
            said = Gather(node=self.node, generation=message.generation, key=message.key, part=message.part)
            self.head.gather(said)
        else:
            self._seq += 1
            self._status = message
            self.head.take(self._report())

    def _report(self) -> Report:
        assert self._status is not None
        names = {*Status.__struct_fields__} & {*Report.__struct_fields__}
        fields = {name: getattr(self._status, name) for name in names}
        return Report(node=self.node, boot=1, seq=self._seq, **fields)

    def close(self, flush_s: float = 0.0) -> None: ...

    # -- as torchrun

    @property
    def world(self) -> tuple[int, int] | None:
        """Rank and size of the script that runs."""
        return (self.met[-1].rank, self.met[-1].world_size) if self.met else None

    def end(self) -> None:
        """The script ends well."""
        self._ends.set()

    def die(self) -> None:
        """The node is lost."""
        self.cut = True
        self.head.apply(ev.Gone(at=time.monotonic(), node=self.node, reason="killed", signal=9))

    def _run(self) -> None:
        try:
            handler = Handler(self.session)
            while not self.cut:
                info = handler.next_rendezvous()
                self.met.append(info)
                while not self.fails and not self._ends.is_set() and not handler.num_nodes_waiting():
                    if self.cut:
                        return
                    time.sleep(0.005)
                if self._ends.is_set():
                    with contextlib.suppress(DistStoreError):
                        store_util.barrier(info.store, info.world_size, "torchelastic/agent/terminal_state", 2.0)
                    raise SystemExit(0)
        except SystemExit as ended:
            self.exit = ended
            if not self.cut:
                self.session.close()
                code, report = int(str(ended.code)), self._report()
                gone = ev.Gone(at=time.monotonic(), node=self.node, reason="ended", code=code, report=report)
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
    until(lambda: not head.changes)
    head.apply(ev.Release(at=time.monotonic(), nodes=(1,), reason="asked", limit=2))
    until(lambda: worlds(second, third) == [(0, 2), (1, 2)])
    first.thread.join(WITHIN_S)
    assert isinstance(first.exit, SystemExit)
    assert first.exit.code == 0
    third.die()
    until(lambda: worlds(second) == [(0, 1)])
    second.end()
    until(lambda: head.status is RunStatus.FINISHED)


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
    until(lambda: head.status is RunStatus.FINISHED)


def test_e1_a_script_that_fails_again_and_again_ends_the_run(head: Head) -> None:
    agents = [Agent(head, 0, fails=True), Agent(head, 1, fails=True)]
    until(lambda: head.status is RunStatus.FAILED)
    assert "4 times in a row with the same members" in head.machine.roster.root.message
    for agent in agents:
        agent.thread.join(WITHIN_S)
        assert [info.world_size for info in agent.met[:5]].count(2) == 4


def test_e1_e10_a_script_that_ends_while_a_change_is_on_its_way_is_not_waited_for(head: Head) -> None:
    """Its end is told just after the head has committed a generation with it: the others go on in that one alone."""
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    until(lambda: not head.changes)
    head.late = lambda: head.machine.roster.root.generation == 2
    first.end()
    third = Agent(head, 2)
    until(lambda: worlds(second, third) == [(0, 2), (1, 2)])
    assert head.members == [1, 2, 3]
    second.end()
    third.end()
    until(lambda: head.status is RunStatus.FINISHED)
    first.thread.join(WITHIN_S)
    assert first.exit is not None


def test_e1_e10_a_script_that_fails_when_another_has_ended_well_is_not_started_again(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    first.end()
    until(lambda: head.machine.roster.finishing)
    second.fails = True
    until(lambda: head.status is RunStatus.FINISHED)
    assert isinstance(second.exit, SystemExit)
    assert second.exit.code == 1
    assert "when others' scripts had ended well" in capsys.readouterr().err
