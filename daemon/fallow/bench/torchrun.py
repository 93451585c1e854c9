"""The same training, the same changes of the membership: under Fallow, and under torchrun's elastic agent.

torchrun with what its documentation says for elastic jobs: `--nnodes=MIN:MAX --rdzv-backend=c10d`, one agent per
member in the place of a node, default time limits; the script saves a checkpoint every 20 steps and goes on from it.
What is compared is how long progress stands still: the longest time between two new steps around the change, minus
the usual one.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fallow.bench import rows, session, steplog
from fallow.bench.peers import torchrun_training
from fallow.bench.peers.processes import World, kill_worker
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.core.quantile import quantile
from fallow.core.schedule import Action, parse_schedule
from fallow.model import FallowError

ROUNDS = 3
RESTART_S = 180.0
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the rendezvous' own store, agents of torch 2.13 wait 60 s for keys in vain after a newcomer, and end."""

SPACING = 12
"""Steps between two changes in our run."""

KINDS = {"absorb": Action.ADD, "kill": Action.KILL, "release": Action.RELEASE}


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for absorb, kill and release, per world and model."""
    for params, members in settings.worlds:
        rounds = settings.n or ROUNDS
        progress(f"torchrun: {members} members, {params / 1e6:g} M parameters, ours")
        mine = ours(members, params, rounds)
        theirs, dead = peer(members, params, rounds, progress)
        for kind in KINDS:
            middle = quantile(theirs[kind], 0.5)
            assert middle is not None
            measured = rows.ours(mine[kind])
            yield Row(
                name=f"{kind}, against torchrun",
                members=members,
                params=params,
                unit="s",
                ours=measured,
                peer=Peer(name="torchrun", p50=middle),
                ratio=middle / max(measured.p50, 1e-3),
                note="; ".join([f"torchrun: {', '.join(f'{value:.1f}' for value in theirs[kind])}", *dead]),
            )


def ours(members: int, params: int, rounds: int) -> dict[str, list[float]]:
    """Standstills under Fallow: per round one comes, one is killed, one comes, one is released."""
    words, step = [], 10
    there, born = list(range(members)), members
    for _ in range(rounds):
        for word in ("+1", f"kill:{there[-1]}", "+1", "-1"):
            words.append(f"{word}@{step}")
            step += SPACING
        there[-1] = born
        born += 2
    items = parse_schedule(",".join(words), members)
    done, finished = session.train_noting(params, step + SPACING, members, items, most=members + 1)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    times = [at for _, at in done.happened]
    for (item, at), until in zip(done.happened, [*times[1:], finished[-1].at], strict=True):
        kind = next(kind for kind, action in KINDS.items() if action is item.action)
        found[kind].append(steplog.standstill(finished, at, until))
    return found


def peer(members: int, params: int, rounds: int, progress: Progress) -> tuple[dict[str, list[float]], list[str]]:
    """Standstills under torchrun for the same changes, each in a world of its own; a release is SIGTERM to an agent.

    Returns:
        Seconds by kind, and a sentence for each time that training did not go on at all (it then counts with the time
        that was waited for it).
    """
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    dead: list[str] = []
    for number in range(rounds):
        for kind, times in found.items():
            progress(f"{kind} {number + 1}/{rounds} under torchrun")
            before = members + (kind != "absorb")
            after = members + (kind != "release")
            with session.folder() as log, World("torchrun", log) as world:
                argv = _command(log, params, members, members + 1)
                agents = [world.start(argv, **ENVIRONMENT) for _ in range(before)]
                world.settled(before, 0.0, 10, RESTART_S)
                began = time.monotonic()
                if kind == "absorb":
                    world.start(argv, **ENVIRONMENT)
                elif kind == "kill":
                    kill_worker(agents[-1])
                else:
                    # Not the first: its agent holds the rendezvous, and everything would end with it.
                    agents[-1].terminate()
                try:
                    done = world.settled(after, began, 10, RESTART_S)
                    times.append(steplog.standstill(done, began, time.monotonic()))
                except FallowError:
                    dead.append(f"after a {kind} it did not go on within {RESTART_S:g} s")
                    times.append(RESTART_S)
    return found, dead


def _command(log: Path, params: int, least: int, most: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={least}:{most}", "--nproc-per-node=1"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"]
    agent += ["--local-addr=127.0.0.1", "--max-restarts=100"]
    return [*agent, torchrun_training.__file__, "--params", str(params), "--notes", str(log)]
