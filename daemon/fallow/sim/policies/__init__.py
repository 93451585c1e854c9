"""Who asks for nodes and hands them out: our head, and policies that it is compared with.

| name | asks for | who gets nodes, and when |
|---|---|---|
| `ours` | what the head's planner says | the head's planner |
| `greedy` | every idle node, one-node jobs | the smallest run, at once |
| `hold:H` | as greedy | a run grows at most once in H s |
| `gated:T` | as greedy | a run grows if that pays within T s |
| `milp:T` | as greedy | BFTrainer's integer program, T s ahead |
| `pilot:M` | one-node jobs of M minutes, again and again | as greedy |
| `pilots:set` | jobs of 90, 56, 34, 22, 14, 8, 6, 4 and 2 minutes | as greedy |

`NAME/UP-DOWN` is the same policy with changes that cost so many seconds (`fallow.sim.costs.restart`). All see the same
engine, runs, costs and luck; those other than `ours` are told the true curves and costs, which `ours` has to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from fallow.model import Exit, FallowError
from fallow.sim.costs import restart
from fallow.sim.head import VirtualHead
from fallow.sim.policies.gates import Gate, Hold
from fallow.sim.policies.greedy import Greedy
from fallow.sim.policies.milp import Milp
from fallow.sim.policies.pilots import SET, Pilots, asked_in, crew_of
from fallow.sim.policies.standing import Crew, Sharing
from fallow.sim.types import Costs, Engine, Head, Options, RunPlan, Runs

ALL = (
    "ours", "greedy", "hold:120", "hold:600", "gated:120", "gated:600", "milp:10", "milp:120", "milp:600",
    "pilot:5", "pilot:10", "pilot:20", "pilot:60", "pilot:120", "pilots:set",
    "greedy/18-12", "gated:600/18-12", "milp:120/18-12", "greedy/60-60", "greedy/250-250", "gated:600/250-250",
)  # fmt: skip
"""What `all` stands for."""


def costs_of(policy: str, costs: Costs) -> Costs:
    """What changes cost under this policy: as given, unless its name says so."""
    _, slash, words = policy.partition("/")
    return restart(words, costs.start) if slash else costs


def make(policy: str, engine: Engine, runs: Runs, plans: Sequence[RunPlan], options: Options) -> Head:
    """The head of that name.

    Args:
        policy: see above.
        engine: the cluster, where the play begins.
        runs: made with `costs_of(policy, ...)`.
        plans: the runs.
        options: of the play; its costs are those without the policy's own.

    Raises:
        FallowError: there is no such policy, or what it needs is not installed.
    """
    options = replace(options, costs=costs_of(policy, options.costs))
    name, _, number = policy.partition("/")[0].partition(":")
    if name == "ours" and not number:
        return VirtualHead(engine, runs, plans, options, name=policy)
    partitions = asked_in(engine.site)
    crew = crew_of(plans, partitions)
    sharing: Sharing = Greedy(crew)
    # Nobody says how long a node may be had: without end, as long as nothing else holds it up.
    lengths: tuple[int, ...] = (options.pilot_minutes,)
    if options.latency == "none" and options.plans == "hidden":
        lengths = ()
    if name in _SHARING:
        sharing = _SHARING[name](crew, _seconds(policy, number), options.costs)
    elif name == "pilot":
        lengths = (max(1, round(_seconds(policy, number))),)
    elif name == "pilots" and number == "set":
        lengths = SET
    elif name != "greedy" or number:
        raise FallowError(f"policy {policy!r}: there is {', '.join(ALL)}", Exit.USAGE)
    return Pilots(policy, crew, partitions, sharing, lengths, engine, runs, options)


def notes(head: Head) -> list[str]:
    """What is worth knowing of a play that has ended: how often HiGHS had to give up."""
    if not (isinstance(head, Pilots) and isinstance(head.sharing, Milp)):
        return []
    milp = head.sharing
    if milp.limited:
        return [f"{milp.limited} of {milp.solved} programs met a limit, and nodes stayed where they were"]
    return [f"{milp.solved} programs were solved, none met a limit"]


_SHARING: dict[str, Callable[[Crew, float, Costs], Sharing]] = {
    "hold": lambda crew, every_s, costs: Hold(crew, every_s),
    "gated": lambda crew, ahead_s, costs: Gate(crew, ahead_s, costs.absorb[0]),
    "milp": lambda crew, ahead_s, costs: Milp(crew, ahead_s, costs.absorb[0], costs.release[0]),
}


def _seconds(policy: str, words: str) -> float:
    try:
        number = float(words)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise FallowError(f"policy {policy!r}: wanted a number, for example {policy.partition(':')[0]}:120", Exit.USAGE)
    return number
