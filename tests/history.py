"""What must hold of every run's history, told from its event log alone."""

from collections import defaultdict
from collections.abc import Iterable

from fallow.model import ChangeKind, EventRecord, MemberPhase, RunStatus

CHANGES = frozenset(kind.value for kind in ChangeKind)
_SEATED = (MemberPhase.MEMBER, MemberPhase.LEAVING)
ENDS = frozenset((RunStatus.FINISHED.value, RunStatus.FAILED.value, RunStatus.CANCELLED.value))


def check_history(events: Iterable[EventRecord]) -> list[str]:
    """Look for what must not be in the event log of a head. It may hold several runs, each from its beginning.

    - numbers of events and of generations grow, and no generation is told twice;
    - members are those before without those who left, and with those who joined; nobody joins twice or leaves twice,
      and a member's host stays the same;
    - a kind of change is what it says: an absorb loses nobody, a release takes nobody in, and only a start needs no
      members, or an eject behind a start that never became complete;
    - the first step of a generation never goes back, but behind the loss of all who had the state (to a checkpoint or
      the beginning), and behind a rollback (to its step). While a member has the state, at most one step is lost;
    - a run ends once, and nothing changes then.

    Returns:
        What is wrong, one line for each; empty: nothing is.
    """
    runs: dict[str, list[EventRecord]] = defaultdict(list)
    problems, last = [], -1
    for event in events:
        if event.seq <= last:
            problems.append(f"event {event.seq} comes behind event {last}")
        last = event.seq
        if event.run is not None:
            runs[event.run].append(event)
    for run, story in runs.items():
        checked = _Run()
        for event in story:
            problems += [f"run {run}, event {event.seq} ({event.kind}): {wrong}" for wrong in checked.take(event)]
    return problems


class _Run:
    """What is known of one run up to an event."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._generation = self._first_step = 0
        self._saved: set[int] = {0}
        "steps of checkpoints, and the beginning"
        self._reached: dict[int, int] = {}
        "generation -> finished steps that a checkpoint of it shows"
        self._back_to: list[tuple[int, int]] = []
        "of rollbacks that have not been done yet: the newest number before each, and the step"
        self._is_empty = True
        self._alone: list[str] = []
        "what is wrong with the change before, unless the run is finished with it"
        self._end = ""

    def take(self, event: EventRecord) -> list[str]:
        """One event more. Returns what is wrong with it."""
        # A member's failure is told by the same word as a run's, with the member.
        is_end = event.kind in ENDS and "member" not in event.data
        if self._end and (is_end or (event.kind in CHANGES and "generation" in event.data)):
            return [f"the run is over: it was {self._end}"]
        if "generation" in event.data and event.kind in CHANGES | {"suspend"}:
            alone, self._alone = self._alone, []
            return alone + list(self._change(event))
        match event.kind:
            case "lost":
                self._is_empty = True
            case "back":
                # Whoever is only ready again lost its seat to a generation that was committed without it.
                self._is_empty = self._is_empty and event.data["phase"] not in _SEATED
            case "rollback":
                self._back_to.append((event.data["generation"], event.data["step"]))
            case "checkpoint" if "step" in event.data and "set aside" not in event.text:
                generation, step = event.data["generation"], event.data["step"]
                self._saved.add(step)
                self._reached[generation] = max(self._reached.get(generation, 0), step)
            case kind if is_end:
                self._end = kind
                # Members that nobody heard may have made the last change and ended the training.
                return self._alone if kind != RunStatus.FINISHED.value else []
        return []

    def _change(self, event: EventRecord) -> Iterable[str]:
        kind, data = event.kind, event.data
        joined, left = dict(data["joined"]), set(data["left"])
        if data["generation"] <= self._generation:
            yield f"generation {data['generation']} comes behind {self._generation}"
        if left - self._members:
            yield f"{_names(left - self._members)} left and was no member"
        if joined.keys() & (self._members - left):
            yield f"{_names(joined.keys() & self._members)} joined and was a member"
        for name, host in joined.items():
            if self._hosts.setdefault(name, host) != host:
                yield f"{name} was on {self._hosts[name]} and is on {host}"
        if kind == ChangeKind.ABSORB and left:
            yield f"it takes nobody out, and {_names(left)} left"
        if kind == ChangeKind.RELEASE and joined:
            yield f"it takes nobody in, and {_names(joined)} joined"
        if kind not in (ChangeKind.START, ChangeKind.EJECT, "suspend") and self._is_empty:
            self._alone = [f"event {event.seq} ({kind}): no member was there"]
        self._generation = max(self._generation, data["generation"])
        self._members = (self._members - left) | joined.keys()
        # Newcomers of generations that never became complete may be all that is left.
        self._is_empty = self._is_empty or self._members == joined.keys()
        count = 0 if kind == "suspend" else data["members"]
        if len(self._members) != count:
            yield f"{count} members are told of, and there are {len(self._members)}: {_names(self._members)}"
        if kind != "suspend":
            yield from self._begin(kind, data["generation"], data["first_step"])
        self._is_empty = kind == "suspend"

    def _begin(self, kind: str, generation: int, first_step: int | None) -> Iterable[str]:
        """A generation begins to compute."""
        if first_step is None:
            return
        earlier = [step for other, step in self._reached.items() if other < generation]
        reached = max([self._first_step + 1, *earlier])
        due = [back for back in self._back_to if generation > back[0]]
        if due:
            ended, step = due[-1]
            # A later one may follow one that never became complete.
            if first_step > step and generation == ended + 1:
                yield f"step {first_step} comes behind a rollback to step {step}"
            self._reached, self._back_to = {}, [back for back in self._back_to if back not in due]
        elif self._is_empty:
            if kind == ChangeKind.START and first_step not in self._saved:
                yield f"step {first_step} is neither the beginning nor that of a checkpoint"
            self._reached = {}
        elif first_step < reached - 1:
            yield f"it begins at step {first_step}, though a member had the state of step {reached - 1}"
        self._first_step = first_step


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
