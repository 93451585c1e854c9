"""One simulation: opens the trace, plays policies over it, and makes a report of what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fallow.model import Exit, FallowError, PolicyScore, Score, SimReport, Struct
from fallow.sim import curves
from fallow.sim.costs import IN_PLACE, RESTART, restart
from fallow.sim.greedy import Greedy
from fallow.sim.head import VirtualHead
from fallow.sim.meter import IdealTally, Tally
from fallow.sim.play import Head, play
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.sites import Profile, harvested
from fallow.sim.types import Costs, Options, Plans, Recording, RunPlan, Scheduler

POLICIES: dict[str, type[Head]] = {"ours": VirtualHead, "greedy": Greedy, "restart": Greedy, "ideal": Head}
"""Name of a policy -> who asks for nodes."""

Progress = Callable[[str, float, float], None]
"""Called with the policy, the share of it that was played, and its ideal ratio so far."""


class Setup(Struct, frozen=True, kw_only=True):
    """Everything that decides what is played; the same one gives the same result."""

    trace: str
    "a file, or one of the names of those that come with Fallow"
    policies: tuple[str, ...] = ("ours",)
    runs: str = curves.DEFAULT
    costs: str = RESTART
    "UP-DOWN in seconds: of changes under the policy `restart`"
    start_up_s: float | None = None
    "None: as measured"
    plans: Plans = "hidden"
    profile: Profile = "preempt"
    bf_interval_s: float = 30.0
    poll_s: float = 30.0
    begin_day: float = 0.0
    days: float | None = None
    "None: as long as is usual for the trace"
    site: str = ""
    "folder with the cluster's own description"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Ground:
    """What is the same for all policies."""

    source: Recording
    plans: list[RunPlan]
    costs: Costs
    restart_costs: Costs


def simulate(setup: Setup, progress: Progress = lambda *_: None) -> SimReport:
    """Play all policies. Ctrl-C ends it with what is known so far.

    Raises:
        FallowError: the setup makes no sense, or it was ended before there was anything to report.
    """
    ground = _ground(setup)
    played: list[PolicyScore] = []
    stopped = False
    for name in dict.fromkeys(setup.policies):
        found, stopped = _play(setup, ground, name, progress)
        if found.seconds > 0:
            played.append(found)
        if stopped:
            break
    if not played:
        raise FallowError("simulate: interrupted before there was anything to report", Exit.TEMPFAIL)
    first = played[0]
    return SimReport(
        **{field: getattr(first, field) for field in Score.__struct_fields__},
        policies=played,
        trace=replace(ground.source.read, name=_shown(setup.trace)),
        seed=setup.seed,
        seconds=first.seconds,
        arm=_arm(setup, ground),
        stopped=stopped,
    )


def _play(setup: Setup, ground: _Ground, name: str, progress: Progress) -> tuple[PolicyScore, bool]:
    """One policy: its figures, and whether it was stopped before its end."""
    source = ground.source
    begin, end = source.begin, source.end
    engine = SlurmSim(source.site, setup.seed, begin, source.jobs, changes=source.changes, plans=setup.plans)
    meter = (IdealTally if name == "ideal" else Tally)(ground.plans, len(source.site.nodes), begin)
    costs = ground.restart_costs if name == "restart" else ground.costs
    options = Options(poll_s=setup.poll_s, costs=costs)

    def tell(at: float, ratio: float) -> None:
        progress(name, (at - begin) / (end - begin), ratio)

    stopped = False
    try:
        play(engine, POLICIES[name], ground.plans, options, meter, end, seed=setup.seed, progress=tell)
    except KeyboardInterrupt:
        stopped = True
    score = meter.score()
    notes = [f"{len(engine.refused)} jobs of others ask for more than there is, and were left out"]
    found = PolicyScore(
        **{field: getattr(score, field) for field in Score.__struct_fields__},
        name=name,
        seconds=(engine.now if stopped else end) - begin,
        notes=notes if engine.refused else [],
    )
    return found, stopped


def _ground(setup: Setup) -> _Ground:
    for name in setup.policies:
        if name not in POLICIES:
            raise FallowError(f"policy {name!r}: there is {', '.join(POLICIES)}", Exit.USAGE)
    source = open_trace(
        setup.trace,
        site_folder=Path(setup.site) if setup.site else None,
        seed=setup.seed,
        begin_day=setup.begin_day,
        days=setup.days,
        profile=setup.profile,
        scheduler=Scheduler(bf_interval_s=setup.bf_interval_s),
    )
    start = IN_PLACE.start if setup.start_up_s is None else (setup.start_up_s, setup.start_up_s)
    ground = _Ground(
        source=source,
        plans=curves.plans(setup.runs, harvested(source.site)),
        costs=replace(IN_PLACE, start=start),
        restart_costs=restart(setup.costs, start),
    )
    if source.changes is None and setup.plans == "known":
        raise FallowError(
            f"--plans known: goes with traces of holes; of {_shown(setup.trace)} the simulated Slurm plans the jobs "
            "itself",
            Exit.USAGE,
        )
    return ground


def _arm(setup: Setup, ground: _Ground) -> str:
    """Under which rules it was played: those of the trace's own site, where it has one."""
    words = [] if ground.source.changes is None else [f"plans {setup.plans}"]
    words += ["the site's own Slurm" if setup.site else setup.profile, f"runs {setup.runs}"]
    slurm = ground.source.site.scheduler
    return ", ".join([*words, f"backfill every {slurm.bf_interval_s:g} s", f"polls every {setup.poll_s:g} s"])


def _shown(trace: str) -> str:
    """The trace's name without the folders it lies in: a report does not say where somebody keeps things."""
    return Path(trace).name
