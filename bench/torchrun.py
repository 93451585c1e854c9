"""A node joins the same training under Fallow and under torchrun's elastic agent.

torchrun runs as its documentation describes for elastic jobs: `--nnodes=MIN:MAX --rdzv-backend=c10d`, one agent in
place of a node, default timeouts. Its script saves a checkpoint every 20 steps and resumes from it. The benchmark
compares the time without progress around the change (`session.standstill`).
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench import session
from bench.rows import Peer, Row, Settings, progress, quantile_of, summarize, world_text, worlds
from bench.session import command, train
from fallow.core.submission.schedule import Action
from fallow.model import Exit, FallowError

ROUNDS = 3
SETTLED_S = 180.0
"""Longest wait until torchrun has settled. A change after which it does not settle counts as this long."""

STEPS = 10
"""Number of new steps after which a world has settled."""


def run(settings: Settings) -> Iterator[Row]:
    """One row for each world and model."""
    rounds = settings.n or ROUNDS
    for params, members in worlds(settings):
        progress(f"torchrun: {world_text(params, members)}, ours")
        figure = summarize(standstills(members, params, rounds))
        progress(f"torchrun: {world_text(params, members)}, torchrun's")
        peer_times = [measure_peer(members, params) for _ in range(rounds)]
        yield Row(
            name="absorb, against torchrun",
            members=members,
            params=params,
            ours=figure,
            peer=Peer(name="torchrun", p50=quantile_of(peer_times, 0.5)),
            ratio=quantile_of(peer_times, 0.5) / max(figure.p50, 1e-3),
            note=f"torchrun: {', '.join(f'{value:.1f}' for value in peer_times)}; {SETTLED_S:g}: did not resume",
        )


def standstills(members: int, params: int, rounds: int) -> list[float]:
    """Standstills in seconds under Fallow. In each round one member joins and leaves."""
    items = ",".join(f"+1@{STEPS + 24 * number},-1@{STEPS + 24 * number + 12}" for number in range(rounds))
    training = train(params, members, items, steps=STEPS + 24 * rounds, shards=members + 1)
    began = [at for _, at in training.schedule_starts] + [training.steps[-1].at]
    return [
        session.standstill(training.steps, since, until)
        for (item, since), until in zip(training.schedule_starts, began[1:], strict=True)
        if item.action is Action.ADD
    ]


def measure_peer(members: int, params: int) -> float:
    """Standstill in seconds under torchrun, in a new world."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="fallow-bench-") as scratch:
        log, agents = Path(scratch), list[psutil.Popen]()
        python, *words = command(params, log, torchrun=True)
        argv = [python, "-m", "torch.distributed.run", f"--nnodes={members}:{members + 1}", "--nproc-per-node=1"]
        argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=bench", "--local-addr=127.0.0.1"]
        argv += ["--max-restarts=100", *words]
        try:
            agents += [_start(argv, log) for _ in range(members)]
            if not _has_settled(log, members, 0.0):
                last = (log / "output.txt").read_text(errors="replace")[-500:]
                raise FallowError(f"torchrun did not start within {SETTLED_S:g} s: {last}", Exit.TEMPFAIL)
            began = time.monotonic()
            agents.append(_start(argv, log))
            if not _has_settled(log, members + 1, began):
                return SETTLED_S
            return session.standstill(session.read_steps(log), began, time.monotonic())
        finally:
            for agent in agents:
                _kill(agent)


def _start(argv: list[str], log: Path) -> psutil.Popen:
    # With the rendezvous' own store, agents of torch 2.13 wait 60 s for keys in vain after a newcomer, and end.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (log / "output.txt").open("ab") as output:
        return psutil.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )


def _kill(agent: psutil.Popen) -> None:
    """Kill an agent and its child processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    agent.wait(10)


def _has_settled(log: Path, size: int, after: float) -> bool:
    """Wait until a world of `size` has made `STEPS` new steps after `after`; False: not within `SETTLED_S`."""
    end = time.monotonic() + SETTLED_S
    while time.monotonic() < end:
        new_steps = [
            finished
            for finished in session.new_steps(session.read_steps(log))
            if finished.at > after and finished.generation == size
        ]
        if len(new_steps) >= STEPS:
            return True
        time.sleep(0.05)
    return False
