"""The testbed's functions for the command line and for other programs. All block; none prints.

Errors are `FallowError`: missing packages, a folder in use, daemons that do not come up (with the ends of
their logs).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from fallow.model import Exit, FallowError
from fallow.testbed import load as jobs_of
from fallow.testbed import registry
from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import Profile
from fallow.testbed.player import Player, record_path, stopped_by_signals
from fallow.traces import trace_path

__all__ = ["down", "load", "status", "up"]


def up(
    folder: Path | None = None,
    *,
    nodes: int = 8,
    gpus: int = 4,
    profile: Profile | str = Profile.PREEMPT,
    bf_interval: int = 1,
) -> Testbed:
    """Start a testbed and wait until its nodes are idle (a few seconds at most).

    It outlives this process. `testbed.env()` is what to put into the environment to use it.
    """
    return Testbed.up(folder, nodes=nodes, gpus=gpus, profile=profile, bf_interval=bf_interval)


def down(folder: Path | None = None, *, all: bool = False) -> list[str]:
    """Take down one testbed, or all of this user's; returns their folders.

    Without a folder there must be exactly one. Leaves no process and no file.
    """
    if all:
        chosen = [Path(record.folder) for record in registry.records()]
    elif folder is not None:
        chosen = [folder.absolute()]
    else:
        chosen = [_only()]
    for path in chosen:
        Testbed.load(path).down()
    return [str(path) for path in chosen]


def status() -> list[dict[str, Any]]:
    """All testbeds of this user, oldest first, as plain dicts (fields of `cluster.TestbedStatus`)."""
    found = []
    for record in registry.records():
        with contextlib.suppress(FileNotFoundError):
            found.append(msgspec.to_builtins(Testbed.load(Path(record.folder)).status()))
    return found


def load(
    folder: Path | None = None,
    *,
    seed: int = 0,
    seconds: float = 300.0,
    utilisation: float = 0.7,
    mean_s: float = jobs_of.MEAN_S,
    trace: str | Path | None = None,
    as_user: str | None = None,
    record: Path | None = None,
) -> dict[str, Any]:
    """Play other users' jobs on a testbed for so many seconds, or until SIGTERM; then cancel what is left of them.

    Jobs come from `seed` and are `mean_s` long on average, or they come from `trace` (`helios` or a path).
    `as_user` (root only) makes them another user's for Slurm too; otherwise only their names say so. Each is a line of
    JSON in `record`
    (default: `load.jsonl` in the testbed's folder). Returns a summary.
    """
    testbed = Testbed.load(folder if folder is not None else _only())
    layout = testbed.layout
    plan = jobs_of.LoadPlan(seed=seed, seconds=seconds, nodes=layout.nodes, gpus=layout.gpus, utilisation=utilisation)
    jobs = jobs_of.from_seed(plan, mean_s) if trace is None else jobs_of.from_trace(plan, trace_path(trace))
    path = record or record_path(testbed)
    with path.open("a") as file:
        player = Player(testbed, file, as_user=as_user)
        with stopped_by_signals(player):
            player.play(jobs, seconds)
    return {
        "folder": str(testbed.folder),
        "planned": len(jobs),
        "submitted": player.submitted,
        "refused": player.refused,
        "record": str(path),
    }


def _only() -> Path:
    found = registry.records()
    if not found:
        raise FallowError("testbed: there is none; start one with `fallow testbed up`", Exit.NOINPUT)
    if len(found) > 1:
        names = ", ".join(record.folder for record in found)
        raise FallowError(f"testbed: there are several ({names}); name the folder", Exit.USAGE)
    return Path(found[0].folder)
