"""One simulation: opens the trace, plays policies over it, and makes a report of what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import asdict, replace

from fallow.config import Slurm
from fallow.model import Exit, FallowError, PolicyScore, SimReport, Struct
from fallow.sim import curves
from fallow.sim.costs import IN_PLACE, restart
from fallow.sim.greedy import Greedy
from fallow.sim.head import VirtualHead
from fallow.sim.play import Head, Ideal, play
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import harvested
from fallow.sim.types import Options, Plans, Recording, RunPlan

POLICIES: dict[str, type[Head]] = {"ours": VirtualHead, "greedy": Greedy, "restart": Greedy, "ideal": Ideal}
"""Name of a policy -> who asks for nodes."""

Progress = Callable[[str, float, float], None]
"""Called with the policy, the share of it that was played, and its ideal ratio so far."""


class Setup(Struct, frozen=True, kw_only=True):
    """Everything that decides what is played; the same one gives the same result."""

    trace: str
    "a file, or one of the names of those that come with Fallow"
    window: Window
    policies: tuple[str, ...]
    runs: str
    costs: str
    "UP-DOWN in seconds: of changes under the policy `restart`"
    start_up_s: float | None
    "None: as measured"
    plans: Plans
    poll_s: float
    site: str | None
    "folder with the cluster's own description"


def simulate(setup: Setup, progress: Progress = lambda *_: None) -> SimReport:
    """Play all policies. Ctrl-C ends it with what is known so far.

    Raises:
        FallowError: the setup makes no sense, or it was ended before there was anything to report.
    """
    for name in setup.policies:
        if name not in POLICIES:
            raise FallowError(f"policy {name!r}: there is {', '.join(POLICIES)}", Exit.USAGE)
    source = open_trace(setup.trace, setup.window, Path(setup.site) if setup.site else None)
    # The trace's name without the folders it lies in: a report does not say where somebody keeps things.
    trace = replace(source.read, name=Path(setup.trace).name)
    if source.changes is None and setup.plans == "known":
        raise FallowError(
            f"--plans known: goes with traces of holes; of {trace.name} the simulated Slurm plans the jobs itself",
            Exit.USAGE,
        )
    start = IN_PLACE.start if setup.start_up_s is None else (setup.start_up_s, setup.start_up_s)
    in_place = Options(
        slurm=Slurm(poll_interval_s=setup.poll_s), costs=replace(IN_PLACE, start=start), seed=setup.window.seed
    )
    restarts = replace(in_place, costs=restart(setup.costs, start))
    plans = curves.plans(setup.runs, harvested(source.site))
    played: list[PolicyScore] = []
    stopped = False
    for name in dict.fromkeys(setup.policies):
        found = _play(setup, source, plans, name, restarts if name == "restart" else in_place, progress)
        stopped = found.seconds < source.end - source.begin
        if found.seconds > 0:
            played.append(found)
        if stopped:
            break
    if not played:
        raise FallowError("simulate: interrupted before there was anything to report", Exit.TEMPFAIL)
    first = {field: value for field, value in asdict(played[0]).items() if field in SimReport.__struct_fields__}
    return SimReport(
        **first, policies=played, trace=trace, seed=setup.window.seed, arm=_arm(setup, source), stopped=stopped
    )


def _play(
    setup: Setup, source: Recording, plans: list[RunPlan], name: str, options: Options, progress: Progress
) -> PolicyScore:
    """One policy, to the end of the trace or until Ctrl-C."""
    begin, end = source.begin, source.end
    engine = SlurmSim(source.site, setup.window.seed, begin, source.jobs, changes=source.changes, plans=setup.plans)
    head = POLICIES[name](engine, plans, options)

    def tell(at: float, ratio: float) -> None:
        progress(name, (at - begin) / (end - begin), ratio)

    with suppress(KeyboardInterrupt):
        play(head, end, tell)
    notes = [f"{len(engine.refused)} jobs of others ask for more than there is, and were left out"]
    return PolicyScore(
        **asdict(head.meter.score()), name=name, seconds=engine.now - begin, notes=notes if engine.refused else []
    )


def _arm(setup: Setup, source: Recording) -> str:
    """Under which rules it was played: those of the trace's own site, where it has one."""
    words = [] if source.changes is None else [f"plans {setup.plans}"]
    words += ["the site's own Slurm" if setup.site else setup.window.profile, f"runs {setup.runs}"]
    slurm = source.site.scheduler
    return ", ".join([*words, f"backfill every {slurm.bf_interval_s:g} s", f"polls every {setup.poll_s:g} s"])
