"""torchrun's rendezvous backend against the real membership machine and gathers, torchrun's agents as threads."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import msgspec
import psutil
import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.utils import store as store_util

import builders
from fallow.agent.merge import Facts, merge_report
from fallow.core.membership import events as ev
from fallow.core.membership.gather import Gathers
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Gather, Order, Report
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.core.membership.watch import Timing
from fallow.core.protocol import BeatReply, FromWorker, HeadSilence, Part, Start, Status, ToWorker
from fallow.model import RunStatus
from fallow.worker.session.session import Session
from fallow.worker.torchrun.backend import Handler
from waiting import wait_for

WITHIN_S = 90.0
SETUP = builders.setup(beat_s=0.05)
until = partial(wait_for, "the head and the scripts are where they should be")


class Head:
    """One run's machine and gathers on a thread; every message goes through its queue, as in the real one."""

    def __init__(self) -> None:
        roster = Roster(Root(run="r", minimum=2, maximum=4, limit=4, scripted=True))
        self.machine = Machine(roster, term=1, timing=Timing(held_grace_s=0.05), at=time.monotonic(), validate=True)
        self.gathers = Gathers()
        self.agents: dict[str, Agent] = {}
        "by host"
        self.late: Callable[[], bool] | None = None
        "what is said of a script's end is kept back until this is true"
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def roster(self) -> Roster:
        return self.machine.roster

    def apply(self, event: ev.Event) -> None:
        self._inbox.put(lambda: self._apply(event))

    def take(self, agent: "Agent", said: Report | Gather) -> None:
        self._inbox.put(lambda: self._take(agent, said))

    def close(self) -> None:
        for agent in self.agents.values():
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

    def _apply(self, event: ev.Event) -> None:
        for instruction in self.machine.handle(event):
            if isinstance(instruction, ev.Admitted):
                self.agents[instruction.host].begin(instruction.node)
            elif isinstance(instruction, Order):
                self._tell(instruction.node, instruction)
        voting = self.machine.voting
        if voting is not None:
            self.gathers.open(voting.change.generation, voting.members)

    def _take(self, agent: "Agent", said: Report | Gather) -> None:
        if isinstance(said, Report):
            self._apply(ev.Reported(at=time.monotonic(), host=agent.host, report=said))
            agent.hear(HeadSilence(silent_s=0.0))
            return
        answer, nodes = self.gathers.take(said)
        for node in nodes:
            assert answer is not None
            self._tell(node, answer)

    def _tell(self, node: int, message: ToWorker) -> None:
        if node in self.roster.nodes:
            self.agents[self.roster.nodes[node].host].hear(message)


class Agent:
    """A node: Fallow's agent and torchrun's, which is its worker, with a script that runs until it is told to end.

    Args:
        head: of the run.
        number: of the node, from 0.
        fails: its script does, as soon as it is started.
    """

    def __init__(self, head: Head, number: int, *, fails: bool = False) -> None:
        self.head, self.node, self.host, self.fails = head, number + 1, f"h{number}", fails
        self.met: list[RendezvousInfo] = []
        self.exit: SystemExit | None = None
        self.cut = False
        "the node is lost"
        self.barrier_s = 1.0
        "torchrun's agent waits so long for the ends of the others' scripts"
        self._ends = threading.Event()
        self._status, self._seq = Status(), 0
        self.session = Session(self._connect, grouped=False)
        head.agents[self.host] = self
        head.apply(
            ev.Expected(at=time.monotonic(), host=self.host, token=f"t{number}", boot=1, slots=1, entry="127.0.0.1")
        )
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
        self.cut = True
        self.head.apply(ev.NodeEnded(at=time.monotonic(), node=self.node, reason="killed", signal=9))

    # -- the agent, and its channel to the worker

    def begin(self, node: int) -> None:
        """The head has admitted it."""
        assert node == self.node
        self.hear(Start(worker=member_name(node), node=node, slot=0, slots=1, address="127.0.0.1", setup=SETUP))
        self.hear(BeatReply(term=1))

    def hear(self, message: ToWorker) -> None:
        if not self.cut:
            self._on_message(message)

    def _connect(self, on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> "Agent":
        self._on_message = on_message
        return self

    def start(self) -> None: ...

    def close(self, flush_s: float) -> None: ...

    def send(self, message: FromWorker) -> None:
        if self.cut:
            return
        if isinstance(message, Part):
            part = Gather(node=self.node, generation=message.generation, key=message.key, part=message.part)
            self.head.take(self, part)
            return
        is_late = self.head.late is not None and not self.head.late()
        self._status = msgspec.structs.replace(message, finish=None) if is_late else message
        self.head.take(self, self._report())

    def _report(self) -> Report:
        self._seq += 1
        return merge_report([Facts(self._status)], node=self.node, boot=1, seq=self._seq, highest=0)

    # -- torchrun's agent

    def _run(self) -> None:
        self.session.open()
        handler = Handler(self.session)
        try:
            self._serve(handler)
        except SystemExit as ended:
            self.exit = ended
        handler.shutdown()
        if self.exit is not None and not self.cut:
            code, report = int(str(self.exit.code)), self._report()
            end = {"node": self.node, "host": self.host, "boot": 1, "reason": "ended", "code": code, "report": report}
            self.head.apply(ev.NodeEnded(at=time.monotonic(), **end))

    def _serve(self, handler: Handler) -> None:
        while not self.cut:
            info = handler.next_rendezvous()
            self.met.append(info)
            while not self.fails and not self._ends.is_set() and not handler.num_nodes_waiting():
                if self.cut:
                    return
                time.sleep(0.005)
            if self._ends.is_set():
                with contextlib.suppress(DistStoreError):
                    store_util.barrier(info.store, info.world_size, "torchelastic/agent/terminal_state", self.barrier_s)
                raise SystemExit(0)


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


def worlds(*agents: Agent) -> list[tuple[int, int] | None]:
    return [agent.world for agent in agents]


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
    until(lambda: head.roster.root.status is RunStatus.FINISHED)


def test_e1_a_script_that_fails_again_and_again_ends_the_run(head: Head) -> None:
    agents = [Agent(head, 0, fails=True), Agent(head, 1, fails=True)]
    until(lambda: head.roster.root.status is RunStatus.FAILED)
    assert "4 times in a row with the same members" in head.roster.root.message
    for agent in agents:
        agent.thread.join(WITHIN_S)
    # Who comes late to a generation whose script has failed elsewhere already starts none in it.
    pairs = [[info.world_size for info in agent.met].count(2) for agent in agents]
    assert max(pairs) <= 4 <= sum(pairs)


def test_e1_e10_a_script_that_ends_while_a_change_is_on_its_way_is_not_waited_for(head: Head) -> None:
    """Its end is told just after the head has committed a generation with it: the others go on in that one alone."""
    first, second = Agent(head, 0), Agent(head, 1)
    until(lambda: worlds(first, second) == [(0, 2), (1, 2)])
    until(lambda: head.roster.root.change is None)
    head.late = lambda: head.roster.root.generation == 2
    first.barrier_s = WITHIN_S
    first.end()
    third = Agent(head, 2)
    until(lambda: worlds(second, third) == [(0, 2), (1, 2)])
    assert head.roster.members == [1, 2, 3]
    second.end()
    third.end()
    until(lambda: head.roster.root.status is RunStatus.FINISHED)
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
    until(lambda: head.roster.root.status is RunStatus.FINISHED)
    second.thread.join(WITHIN_S)
    assert isinstance(second.exit, SystemExit)
    assert second.exit.code == 1
    assert "when others' scripts had ended well" in capsys.readouterr().err
