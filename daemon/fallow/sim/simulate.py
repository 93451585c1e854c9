"""One simulation: opens the trace, plays policies over it, and makes a report of what came of it."""

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
from fallow.sim.traces.sites import harvested
from fallow.sim.types import Options, Plans
from fallow.sim.work import Head

PROGRESS_S = 600.0
"""Progress is told so often, in virtual time."""


class Ideal(Head):
    """Who knows everything, and for whom changes are free."""

    tally = IdealTally


POLICIES: dict[str, type[Head]] = {"ours": VirtualHead, "greedy": Greedy, "restart": Greedy, "ideal": Ideal}
"""Name of a policy -> who asks for nodes."""


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
    """Play all policies; the same arguments give the same result.

    Args:
        trace: a file, or one of the names of those that come with Fallow.
        window: what to play of it.
        policies: names.
        runs: in the words of `published.plans`.
        costs: UP-DOWN in seconds: of changes under the policy `restart`.
        start_up_s: None: as measured.
        plans: does Slurm know when holes end?
        poll_s: seconds between polls.
        site: folder with the cluster's own description.
        progress: called with the policy, the share of it that was played, and its ideal ratio so far.

    Raises:
        FallowError: the words make no sense.
    """
    for name in policies:
        if name not in POLICIES:
            raise FallowError(f"policy {name!r}: there is {', '.join(POLICIES)}", Exit.USAGE)
    source = open_trace(trace, window, Path(site) if site else None)
    # The trace's name without the folders it lies in: a report does not say where somebody keeps things.
    read = replace(source.read, name=Path(trace).name)
    if source.changes is None and plans == "known":
        raise FallowError(
            f"--plans known: goes with traces of holes; of {read.name} the simulated Slurm plans the jobs itself",
            Exit.USAGE,
        )
    start = published.IN_PLACE.start if start_up_s is None else (start_up_s, start_up_s)
    in_place = Options(
        slurm=Slurm(poll_interval_s=poll_s), costs=replace(published.IN_PLACE, start=start), seed=window.seed
    )
    restarts = replace(in_place, costs=published.restart(costs, start))
    run_plans = published.plans(runs, harvested(source.site))
    played: list[PolicyScore] = []
    begin, lasts_s = source.begin, source.end - source.begin
    for name in dict.fromkeys(policies):
        engine = SlurmSim(source.site, window.seed, begin, source.jobs, changes=source.changes, plans=plans)
        head = POLICIES[name](engine, run_plans, restarts if name == "restart" else in_place)
        play(head, source.end, lambda at, ratio: progress(name, (at - begin) / lasts_s, ratio))  # noqa: B023
        notes = [f"{len(engine.refused)} jobs of others ask for more than there is, and were left out"]
        score = asdict(head.meter.score())
        played.append(PolicyScore(**score, name=name, notes=notes if engine.refused else []))
    first = {field: getattr(played[0], field) for field in Score.__struct_fields__}
    # Under which rules it was played: those of the trace's own site, where it has one.
    arm = [] if source.changes is None else [f"plans {plans}"]
    arm += ["the site's own Slurm" if site else window.profile, f"runs {runs}"]
    arm += [f"backfill every {source.site.scheduler.bf_interval_s:g} s", f"polls every {poll_s:g} s"]
    return SimReport(**first, policies=played, trace=read, seed=window.seed, seconds=lasts_s, arm=", ".join(arm))


def play(head: Head, until: float, progress: Callable[[float, float], None] = lambda at, ratio: None) -> None:
    """Play a cluster, from where it stands, and whoever asks it for nodes, who is closed then.

    At equal times the engine comes first, then the runs, then the head; what they set off at once is played in further
    turns of the same moment.

    Args:
        head: who asks for nodes.
        until: Unix time of the trace.
        progress: called with the time and the ideal ratio so far.
    """
    engine, meter, loop = head.engine, head.meter, head.loop
    told_at = engine.now
    meter.pool(engine.now, engine.idle_nodes())
    try:
        while (at := max(engine.now, min(engine.next_at(), loop.due))) <= until:
            happenings = engine.advance(at)
            for happening in happenings:
                # Timers of one time run in no order; these are heard in theirs, and before them.
                loop.call_soon(head.hear, happening)
            meter.pool(at, engine.idle_nodes())
            if happenings or loop.due <= at:
                head.wake()
            if at >= told_at + PROGRESS_S:
                told_at = at
                progress(at, meter.score().ideal_ratio)
        engine.advance(until)
    finally:
        loop.close()
        meter.end(engine.now, engine.requests, engine.waits())
