"""Slurm through pyslurm where that is better, and through its commands for the rest.

Through pyslurm go the polls, which are most of what is asked. The rest is rare, and the commands do it better: pyslurm
cannot submit heterogeneous jobs or ask when a job would start; of a plain job it cannot say `--mem=0` or
`--propagate=NONE`, and it runs none of the site's SPANK and cli_filter plugins, so a harvest job would not be what the
user's own sbatch makes; what it says of a cancellation may be of another one; and slurmctld's clock stands in
`scontrol show config` alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from pathlib import Path
from typing import Literal

from fallow.model import ClusterConfig, ClusterState
from fallow.slurm.cli import QUERY_TIMEOUT_S, SUBMIT_TIMEOUT_S, CliClient
from fallow.slurm.client import SlurmClient, SlurmUnavailable
from fallow.slurm.pyslurm_process import ChildDied, PyslurmProcess
from fallow.slurm.state import on_our_clock

OLDEST = (25, 11)
"pyslurm's first version with all classes that are used here"

START_TIMEOUT_S = 20.0
"Of a child: importing pyslurm; a configless site's slurm.conf comes from slurmctld then."
RETRY_S, RETRY_MAX_S = 5.0, 300.0
POLLS_PER_CHILD = 1000
"pyslurm is said to leak (PySlurm issue 60); at one poll in 30 s a child lives for 8 hours."


def slurm_client(setting: Literal["auto", "cli", "pyslurm"]) -> SlurmClient:
    """The client for a setting; `auto`: pyslurm where it imports and is for the cluster's version, else the commands.

    pyslurm is looked for, not imported: that may end the process.
    """
    if setting == "cli":
        return CliClient(why="as configured")
    spec = importlib.util.find_spec("pyslurm")
    if setting == "auto" and (spec is None or spec.origin is None):
        return CliClient(why="pyslurm is not installed")
    return PyslurmClient(insist=setting == "pyslurm")


class PyslurmClient(CliClient):
    """`CliClient` that polls through pyslurm in a process of its own, which is started again after a crash or a hang.

    While there is no such process the commands answer in its place, and `backend` says why.

    Args:
        conf: the slurm.conf to use; None: what the environment says.
        insist: never let the commands answer a poll; say that Slurm is not available.
    """

    def __init__(
        self,
        conf: Path | None = None,
        *,
        insist: bool = False,
        query_timeout_s: float = QUERY_TIMEOUT_S,
        submit_timeout_s: float = SUBMIT_TIMEOUT_S,
    ) -> None:
        super().__init__(conf, query_timeout_s=query_timeout_s, submit_timeout_s=submit_timeout_s)
        self._insist = insist
        self._turn = asyncio.Lock()
        self._child: PyslurmProcess | None = None
        self._child_polls = 0
        self._release: tuple[int, int] | None = None
        self._failures = 0
        self._not_before = 0.0
        self.backend = "pyslurm, not asked yet"

    async def config(self) -> ClusterConfig:
        found = await self._configure()
        async with self._turn:
            await self._ready()
        return found

    async def poll(self) -> ClusterState:
        async with self._turn:
            state = await self._ask()
        if state is not None:
            # In a thread, as the commands' answers are read.
            return await asyncio.to_thread(on_our_clock, state, time.time(), self.clock_offset_s)
        if self._insist:
            raise SlurmUnavailable(f'{self.backend}; mend it, or set [slurm] client = "auto"')
        return await super().poll()

    async def close(self) -> None:
        async with self._turn:
            await self._end()

    # -- the child; all with the turn held ----------------------------------------------------------------------

    async def _ask(self) -> ClusterState | None:
        """The child's poll, on slurmctld's clock; None: there is no child, ask the commands.

        Raises:
            SlurmUnavailable: slurmctld did not answer the child; so the commands would fare no better.
        """
        child = await self._ready()
        if child is None:
            return None
        state: ClusterState | None = None
        try:
            async with asyncio.timeout(self._query_timeout_s):
                state = await child.poll()
        except TimeoutError:
            reason = f"no answer within {self._query_timeout_s:g} s"
            self._failed(reason)
            raise SlurmUnavailable(f"pyslurm: {reason}; check slurmctld with `scontrol ping`") from None
        except ChildDied as error:
            self._failed(f"ended: {error}")
            return None
        finally:
            self._child_polls += 1
            # After an error too: a new one reads slurm.conf again, which may be what has changed.
            if state is None or self._child_polls >= POLLS_PER_CHILD:
                await self._end()
        self._failures = 0
        return state

    async def _ready(self) -> PyslurmProcess | None:
        if self._child is not None or time.monotonic() < self._not_before:
            return self._child
        if self._release is None:
            await self._configure()
        child = PyslurmProcess(self.conf)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                version = await child.start()
        except TimeoutError:
            self._failed(f"not started within {START_TIMEOUT_S:g} s")
        except ChildDied as error:
            self._failed(f"not started: {error}")
        else:
            if (unsuited := _unsuited(version, self._release)) is None:
                self._child, self._child_polls = child, 0
                self.backend = f"pyslurm {version}"
                return child
            self._not_before = float("inf")  # until the cluster has another version
            self.backend = f"command line ({unsuited})"
        finally:
            if self._child is not child:
                await child.end()
        return None

    async def _configure(self) -> ClusterConfig:
        found = await super().config()
        release = _release(found.slurm_version)
        if release != self._release:
            self._release, self._not_before = release, 0.0
        return found

    def _failed(self, reason: str) -> None:
        delay = min(RETRY_S * 2.0 ** min(self._failures, 20), RETRY_MAX_S)
        self._failures += 1
        self._not_before = time.monotonic() + delay
        self.backend = f"command line (pyslurm {reason}; tried again in {delay:g} s)"

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _unsuited(version: str, cluster: tuple[int, int] | None) -> str | None:
    """Why this pyslurm cannot be used with Slurm of that release; None when it can."""
    release = _release(version)
    if release is None or release < OLDEST:
        return f"pyslurm {version} is older than {OLDEST[0]}.{OLDEST[1]:02}"
    if release != cluster:
        wanted = "an unknown version of Slurm" if cluster is None else f"Slurm {cluster[0]}.{cluster[1]:02}"
        return f"pyslurm {version} is for its own version of Slurm, and the cluster runs {wanted}"
    return None
