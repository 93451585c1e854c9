"""One simulation: open a trace, play policies over it, and report their scores."""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import asdict, replace

from fallow.config import Slurm
from fallow.model import Exit, FallowError, PolicyScore, Score, SimReport
from fallow.sim import published
from fallow.sim.greedy import Greedy
from fallow.sim.head import VirtualHead
from fallow.sim.meter import IdealTally
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import harvested_partitions
from fallow.sim.types import Options, Plans
from fallow.sim.work import Head

PROGRESS_S = 600.0
"""Virtual seconds between two reports of progress."""


class Ideal(Head):
    """The ideal policy: full knowledge and free changes."""

    tally = IdealTally


POLICIES: dict[str, type[Head]] = {"ours": VirtualHead, "greedy": Greedy, "restart": Greedy, "ideal": Ideal}
"""Name of a policy -> its class."""


def simulate(
    trace: str,
    window: Window,
    *,
    policies: Sequence[str],
    runs: str,
    costs: str,
    start_up_s: float | None,
    plans: Plans,
    poll_s: float,
    site: str | None,
    progress: Callable[[str, float, float], None],
) -> SimReport:
    """Play all policies. The same arguments give the same result.

    Args:
        trace: a file, or the name of a trace that comes with Fallow.
        window: the part of the trace to play.
        policies: names of policies.
        runs: the runs, as `published.parse_runs` reads them.
        costs: UP-DOWN, the durations in seconds of changes under the policy `restart`.
        start_up_s: seconds from the start of a job until its node can join; None: Fallow's measurement.
        plans: whether Slurm knows when holes end.
        poll_s: seconds between polls.
        site: folder with the output of the site's `scontrol`.
        progress: called with the policy, the share of the trace that was played (0 to 1), and its ideal ratio so far.

    Raises:
        FallowError: an argument is not valid, or the trace cannot be read.
    """
    for name in policies:
        if name not in POLICIES:
            raise FallowError(f"--policy {name!r}: no such policy; choose {', '.join(POLICIES)}", Exit.USAGE)
    source = open_trace(trace, window, Path(site) if site else None)
    # The name without its folders: a report does not reveal the user's paths.
    read = replace(source.summary, name=Path(trace).name)
    if source.changes is None and plans == "known":
        raise FallowError(
            f"--plans known needs a trace of idle nodes; {read.name} has jobs, which the simulated Slurm plans itself",
            Exit.USAGE,
        )
    start = published.IN_PLACE.start if start_up_s is None else (start_up_s, start_up_s)
    in_place = Options(
        slurm=Slurm(poll_interval_s=poll_s), costs=replace(published.IN_PLACE, start=start), seed=window.seed
    )
    restarts = replace(in_place, costs=published.restart_costs(costs, start))
    run_plans = published.parse_runs(runs, harvested_partitions(source.site))
    played: list[PolicyScore] = []
    begin, lasts_s = source.begin, source.end - source.begin
    for name in dict.fromkeys(policies):
        engine = SlurmSim(source.site, window.seed, begin, source.jobs, changes=source.changes, plans=plans)
        head = POLICIES[name](engine, run_plans, restarts if name == "restart" else in_place)
        play(head, source.end, lambda at, ratio: progress(name, (at - begin) / lasts_s, ratio))  # noqa: B023
        notes = [f"{len(engine.impossible_jobs)} jobs of others need more nodes than their partition has; ignored"]
        score = asdict(head.meter.score())
        played.append(PolicyScore(**score, name=name, notes=notes if engine.impossible_jobs else []))
    first = {field: getattr(played[0], field) for field in Score.__struct_fields__}
    # The rules of the simulation: those of the site if the trace has one.
    arm = [] if source.changes is None else [f"plans {plans}"]
    arm += ["the site's own Slurm" if site else window.profile, f"runs {runs}"]
    arm += [f"backfill every {source.site.scheduler.bf_interval_s:g} s", f"polls every {poll_s:g} s"]
    return SimReport(**first, policies=played, trace=read, seed=window.seed, seconds=lasts_s, arm=", ".join(arm))


def play(head: Head, until: float, progress: Callable[[float, float], None] = lambda at, ratio: None) -> None:
    """Play a cluster and a policy from the current time to `until`, then close the policy's loop.

    At equal times the engine comes first, then the runs, then the head. What they trigger at once is played in further
    iterations of the same moment.

    Args:
        head: the policy.
        until: Unix time of the trace.
        progress: called with the time and the ideal ratio so far.
    """
    engine, meter, loop = head.engine, head.meter, head.loop
    told_at = engine.now
    meter.set_idle_nodes(engine.now, engine.idle_nodes())
    try:
        while (at := max(engine.now, min(engine.next_at(), loop.next_due_at))) <= until:
            events = engine.advance(at)
            for event in events:
                # Timers of one time run in any order; events keep their order and come before timers.
                loop.call_soon(head.hear, event)
            meter.set_idle_nodes(at, engine.idle_nodes())
            if events or loop.next_due_at <= at:
                head.wake()
            if at >= told_at + PROGRESS_S:
                told_at = at
                progress(at, meter.score().ideal_ratio)
        engine.advance(until)
    finally:
        loop.close()
        meter.end(engine.now, engine.requests, engine.waits())
