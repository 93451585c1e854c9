"""The same training, the same changes of the membership: under Fallow, and under torchft.

torchft with the settings of its examples: one replica group per member over gloo with 5 s, Manager 30 s, lighthouse
with a join timeout of 10 s and a tick of 100 ms. torchft is not needed by Fallow: where it is not installed, its
column stays empty. What is compared is how long progress stands still, see `fallow.bench.torchrun`; torchft discards
the step in which a member is lost, with its samples, and ours does it again.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator

from fallow.bench import rows, session, steplog, torchrun
from fallow.bench.peers import torchft_lighthouse, torchft_training
from fallow.bench.peers.processes import World, kill_node
from fallow.bench.rows import Peer, Progress, Row, Settings
from fallow.core.quantile import quantile

ROUNDS = 5
PATIENCE_S = 120.0
KINDS = ("absorb", "kill")


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for absorb and kill, per world and model."""
    installed = importlib.util.find_spec("torchft") is not None
    for params, members in settings.worlds:
        rounds = settings.n or ROUNDS
        progress(f"torchft: {members} members, {params / 1e6:g} M parameters, ours")
        mine = torchrun.ours(members, params, rounds)
        progress(f"torchft: {members} members, {params / 1e6:g} M parameters, theirs")
        theirs = peer(members, params, rounds) if installed else {}
        for kind in KINDS:
            measured = rows.ours(mine[kind])
            middle = quantile(theirs.get(kind, []), 0.5)
            note = "torchft is not installed: pip install torchft"
            if middle is not None:
                note = f"torchft: {', '.join(f'{value:.2f}' for value in theirs[kind])}"
            yield Row(
                name=f"{kind}, against torchft",
                members=members,
                params=params,
                unit="s",
                ours=measured,
                peer=None if middle is None else Peer(name="torchft", p50=middle),
                ratio=None if middle is None else middle / max(measured.p50, 1e-3),
                note=note,
            )


def peer(members: int, params: int, rounds: int) -> dict[str, list[float]]:
    """Standstills under torchft: one replica comes, one is killed, in turn."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with session.folder() as log, World("torchft", log) as world:
        place = log / "lighthouse"
        world.start([sys.executable, torchft_lighthouse.__file__, str(place)])
        world.until("the lighthouse's address", lambda _: place.exists(), PATIENCE_S)
        address = place.read_text()

        def start(number: int) -> subprocess.Popen[bytes]:
            argv = [sys.executable, torchft_training.__file__, "--params", str(params), "--notes", str(log)]
            return world.start([*argv, "--replica", f"replica_{number}", "--lighthouse", address])

        replicas = [start(number) for number in range(members)]
        world.settled(members, 0.0, 10, PATIENCE_S)
        for number in range(rounds):
            for kind in KINDS:
                began = time.monotonic()
                if kind == "absorb":
                    replicas.append(start(members + number))
                else:
                    kill_node(replicas.pop(0))
                done = world.settled(members + (kind == "absorb"), began, 10, PATIENCE_S)
                found[kind].append(steplog.standstill(done, began, time.monotonic()))
    return found
