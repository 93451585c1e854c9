"""One simulation: opens the trace, plays policies over it, and makes a report of what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import msgspec

from fallow.model import Exit, FallowError, SimReport, Struct
from fallow.sim import curves, policies
from fallow.sim.costs import IN_PLACE, measured, restart
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.hole_watch import Watch
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.pool import PoolSim
from fallow.sim.report import Played, report, trace_read
from fallow.sim.series import Look, Recorder, WatchedEngine, WatchedMeter, WatchedRuns
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import RecordedJobs
from fallow.sim.traces.sites import Profile, harvested
from fallow.sim.twin import HeldUp, Holdings, Ran, apart, held_up
from fallow.sim.types import Costs, Holes, Latency, Meter, Options, Plans, RunPlan, Runs, Scheduler, Trace
from fallow.sim.work import Work
from fallow.traces import FOLDER

DAY_S = 86400.0

SWEEP = ("2-1", "5-3", "18-12", "60-60", "250-250")
"""Costs UP-DOWN of a change, seconds: from the quickest restart to the slowest."""


_AS_HOLES = {"earth": "earth-holes", "helios": "earth-holes"}
"""The same cluster's idle nodes, which need no Slurm to be known."""

ADAPTDL = "adaptdl_scaling.csv"


class Stopped(Exception):
    """Raised by a progress callback to end a play; what is known so far counts."""


class Setup(Struct, frozen=True, kw_only=True):
    """Everything that decides what is played; the same one and the same policy give the same result."""

    trace: str
    "a file, or one of the names of those that come with Fallow"
    runs: str = curves.DEFAULT
    costs: str = ""
    "UP-DOWN, or a file with rows of a benchmark; empty: as measured for Fallow"
    start_up_s: float | None = None
    "None: as measured"
    latency: Latency = "slurm"
    plans: Plans = "hidden"
    profile: Profile = "preempt"
    version: tuple[int, int] = (25, 11)
    bf_interval_s: float = 30.0
    poll_s: float = 30.0
    begin_day: float = 0.0
    days: float | None = None
    "None: as long as is usual for the trace"
    site: str = ""
    "folder with the cluster's own description"
    outages: tuple[str, ...] = ()
    "files with its nodes' events and its reservations"
    seed: int = 0
    record: bool = False
    "keep what plots need"


@dataclass(frozen=True, slots=True)
class Ground:
    """What is the same for all policies."""

    source: Trace | Holes
    jobs: RecordedJobs | None
    "the same, where it has jobs"
    holes: Holes | None
    "the same, where it has nothing but holes"
    plans: tuple[RunPlan, ...]
    costs: Costs


def names(words: Sequence[str], sweep: bool) -> list[str]:
    """Policies as they are to be played, each once.

    Args:
        words: as given; none: ours; `all` is one of them.
        sweep: each that has no costs of its own with those of `SWEEP`, too.
    """
    asked = [name for word in words or ("ours",) for name in (policies.ALL if word == "all" else (word,))]
    if sweep:
        asked += [f"{name}/{costs}" for name in asked if "/" not in name for costs in SWEEP]
    return list(dict.fromkeys(asked))


def check(setup: Setup, asked: Sequence[str]) -> None:
    """Refuse what cannot be played before anything is.

    Raises:
        FallowError: which word is wrong, and what there is.
    """
    ground = _ground(setup)
    options = _options(setup, ground)
    engine, _ = _engine(ground, options)
    meter = Tally(ground.plans, len(engine.site.nodes), engine.now)
    for name in asked:
        work = Work(ground.plans, policies.costs_of(name, options.costs), setup.seed, meter, engine.now)
        policies.make(name, engine, work, ground.plans, options)


def play_policy(setup: Setup, name: str, first: bool, progress: Callable[[float, float], None]) -> Played:
    """Play one policy.

    Args:
        setup: what to play.
        name: of the policy.
        first: it is the one of which the node map is kept, if anything is.
        progress: called with the share that was played and the ideal ratio so far; may raise `Stopped`.
    """
    ground = _ground(setup)
    source, options = ground.source, _options(setup, ground)
    costs = policies.costs_of(name, options.costs)
    inner, look = _engine(ground, options)
    recorder = Recorder(source.site, source.begin, source.end, with_map=first) if setup.record else None
    holdings = Holdings(source.site)
    hear = [holdings.happened] if recorder is None else [holdings.happened, recorder.happened]
    engine = WatchedEngine(inner, hear, recorder, look)
    meter: Meter = Tally(ground.plans, len(source.site.nodes), source.begin)
    if recorder is not None:
        meter = WatchedMeter(meter, recorder)
    runs: Runs = Work(ground.plans, costs, setup.seed, meter, source.begin)
    if recorder is not None:
        runs = WatchedRuns(runs, recorder)
    head = policies.make(name, engine, runs, ground.plans, options)
    until, stopped = source.begin, False

    def told(at: float, ratio: float) -> None:
        nonlocal until
        until = at
        progress((at - source.begin) / (source.end - source.begin), ratio)

    try:
        play(engine, head, runs, meter, source.end, told)
        until = source.end
    except Stopped:
        stopped = True
    notes = policies.notes(head)
    found = HeldUp()
    if isinstance(inner, SlurmSim) and ground.jobs is not None:
        cycle_s = source.site.scheduler.bf_interval_s
        jobs, stays = list(ground.jobs.jobs()), holdings.stays(until)
        found = held_up(source.site, jobs, inner.ran, inner.nodes, _without_us(setup).ran, stays, until, cycle_s)
        for job_id, seconds in found.waited.items():
            meter.waited(job_id, seconds)
        if found.earlier or found.later:
            notes.append(
                f"of {found.compared} jobs of others {found.earlier} started more than {cycle_s:g} s earlier and "
                f"{found.later} later (by {found.latest_s:.0f} s at the most) because others changed places"
            )
        if inner.refused:
            notes.append(f"{len(inner.refused)} jobs of others ask for more than there is, and were left out")
    series = None if recorder is None else recorder.series(until)
    if series is not None:
        series = msgspec.structs.replace(series, queued_s=found.queued_s, queued_without_s=found.queued_without_s)
    return Played(
        name=name,
        score=meter.score(),
        seconds=until - source.begin,
        stopped=stopped,
        absorb_s=costs.absorb[0],
        notes=tuple(notes),
        series=series,
    )


def report_of(setup: Setup, played: Sequence[Played]) -> SimReport:
    """What came of it."""
    ground = _ground(setup)
    trace = trace_read(_shown(setup.trace), ground.source.problems)
    if ground.jobs is not None and (told := apart(ground.jobs.jobs(), _without_us(setup).ran)):
        trace = msgspec.structs.replace(trace, assumed=[*trace.assumed, told])
    return report(played, trace, setup.seed, _arm(setup, ground))


def holes_of(setup: Setup) -> HoleLengths:
    """How long the cluster's holes last if nobody harvests: as the trace has them, or as the simulated Slurm makes them
    of its jobs."""
    holes = _ground(setup).holes
    if holes is None:
        return _without_us(setup).holes
    watch = Watch(holes.begin)
    for at, joined, left in holes.changes():
        watch.changed(at, joined, left)
    return watch.until(holes.end)


def _arm(setup: Setup, ground: Ground) -> str:
    """Under which rules it was played: those of the trace's own site, where it has one."""
    slurm = ground.source.site.scheduler
    version = ".".join(f"{number:02}" for number in slurm.version)
    words = [f"latency {setup.latency}"]
    if ground.holes is not None:
        words.append(f"plans {setup.plans}")
    words.append("the site's own Slurm" if setup.site else setup.profile)
    if setup.latency == "slurm":
        words += [f"Slurm {version}", f"backfill every {slurm.bf_interval_s:g} s", f"polls every {setup.poll_s:g} s"]
    return ", ".join(words)


def _shown(trace: str) -> str:
    """The trace's name without the folders it lies in: a report does not say where somebody keeps things."""
    return Path(trace).name


@lru_cache(maxsize=1)
def _ground(setup: Setup) -> Ground:
    name = setup.trace
    if setup.latency == "none" and name in _AS_HOLES:
        name = _AS_HOLES[name]
    source = open_trace(
        name,
        site_folder=Path(setup.site) if setup.site else None,
        outages=[Path(name) for name in setup.outages],
        seed=setup.seed,
        begin_day=setup.begin_day,
        days=setup.days,
        profile=setup.profile,
        scheduler=Scheduler(version=setup.version, bf_interval_s=setup.bf_interval_s),
    )
    jobs = source if isinstance(source, RecordedJobs) else None
    if jobs is not None and setup.latency == "none":
        raise FallowError(
            f"--latency none: {_shown(name)} has jobs, and Slurm starts those and ours together; give a trace of holes "
            "(earth, philly, summit), or --latency slurm",
            Exit.USAGE,
        )
    if jobs is not None and setup.plans == "known":
        raise FallowError(
            f"--plans known: goes with traces of holes; of {_shown(name)} the simulated Slurm plans the jobs itself",
            Exit.USAGE,
        )
    partitions = harvested(source.site)
    runs = curves.plans(setup.runs, FOLDER / ADAPTDL)
    return Ground(
        source=source,
        jobs=jobs,
        holes=cast(Holes, source) if jobs is None else None,
        plans=tuple(msgspec.structs.replace(plan, partitions=partitions) for plan in runs),
        costs=_costs(setup),
    )


@dataclass(frozen=True, slots=True)
class WithoutUs:
    """The same cluster if nobody harvests."""

    ran: Ran
    "when others' jobs run"
    holes: HoleLengths


@lru_cache(maxsize=1)
def _without_us(setup: Setup) -> WithoutUs:
    source = _ground(setup).jobs
    assert source is not None
    engine = SlurmSim(source.site, source.jobs(), setup.seed, source.begin)
    watch = Watch(source.begin)
    while (at := engine.next_at()) <= source.end:
        engine.advance(at)
        watch.seen(at, engine.idle_mask())
    engine.advance(source.end)
    return WithoutUs(engine.ran, watch.until(source.end))


def _costs(setup: Setup) -> Costs:
    start = IN_PLACE.start if setup.start_up_s is None else (setup.start_up_s, setup.start_up_s)
    if not setup.costs:
        return msgspec.structs.replace(IN_PLACE, start=start)
    if re.fullmatch(r"[\d.]+-[\d.]+", setup.costs):
        return restart(setup.costs, start)
    return measured(Path(setup.costs), start)


def _options(setup: Setup, ground: Ground) -> Options:
    return Options(seed=setup.seed, latency=setup.latency, plans=setup.plans, poll_s=setup.poll_s, costs=ground.costs)


def _engine(ground: Ground, options: Options) -> tuple[PoolSim | SlurmSim, Look]:
    """The cluster, and how its nodes are looked at."""
    if ground.holes is not None:
        pool = PoolSim(ground.holes, options)
        return pool, lambda: (pool.idle_mask(), 0)
    assert ground.jobs is not None
    slurm = SlurmSim(ground.jobs.site, ground.jobs.jobs(), options.seed, ground.jobs.begin)
    return slurm, lambda: (slurm.idle_mask(), slurm.down_mask())
