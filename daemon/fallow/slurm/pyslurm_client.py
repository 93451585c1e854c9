"""Slurm through pyslurm where that is better, and through its commands for the rest.

Through pyslurm go the polls, which are most of what is asked. The rest is rare, and the commands do it better: pyslurm
cannot submit heterogeneous jobs or ask when a job would start; of a plain job it cannot say `--mem=0` or
`--propagate=NONE`, and it runs none of the site's SPANK and cli_filter plugins, so a harvest job would not be what the
user's own sbatch makes; what it says of a cancellation may be of another one; and slurmctld's clock stands in
`scontrol show config` alone.
"""

import asyncio
import importlib.util
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from fallow import __version__
from fallow.clock import steady
from fallow.model import ClusterConfig, ClusterState, Exit
from fallow.slurm.cli import QUERY_TIMEOUT_S, SUBMIT_TIMEOUT_S, CliClient
from fallow.slurm.client import SlurmClient, SlurmUnavailable
from fallow.slurm.process import Done, query_environment, run
from fallow.slurm.pyslurm_poll import Polled
from fallow.slurm.state import on_our_clock

RETRY_S, RETRY_MAX_S = 5.0, 300.0
BEGIN_S = 5.0
"""A process that has not imported pyslurm after so long is given up, unless nobody else may answer the poll."""


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
    """`CliClient` that polls through pyslurm, each time in a new process (`pyslurm_poll`).

    After a poll that came to nothing the commands answer for a while, and `backend` says why.

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
        self._version: str | None = None
        "of the cluster's Slurm; None: not asked yet"
        self._failures = 0
        self._not_before = 0.0
        self.backend = "pyslurm, not asked yet"

    async def config(self) -> ClusterConfig:
        found = await super().config()
        if found.slurm_version != self._version:
            self._version, self._not_before = found.slurm_version, 0.0
        return found

    async def poll(self) -> ClusterState:
        self.start_s = 0.0
        state = await self._ask() if time.monotonic() >= self._not_before else None
        if state is not None:
            # In a thread, as the commands' answers are read.
            return await asyncio.to_thread(on_our_clock, state, steady(), self.clock_offset_s)
        if self._insist:
            raise SlurmUnavailable(f'{self.backend}; mend it, or set [slurm] client = "auto"')
        return await super().poll()

    async def _ask(self) -> ClusterState | None:
        """pyslurm's poll, on slurmctld's clock; None: it cannot be had, ask the commands.

        Raises:
            SlurmUnavailable: slurmctld did not answer; so the commands would fare no better.
        """
        if self._version is None:
            await self.config()
        command = [sys.executable, "-Pm", "fallow.slurm.pyslurm_poll", self._version or "", __version__]
        began = time.monotonic()
        try:
            done = await run(
                command,
                environment=query_environment(self.conf),
                timeout_s=self._query_timeout_s,
                begin_s=None if self._insist else BEGIN_S,
            )
            if done.code == 0:
                polled = await asyncio.to_thread(msgspec.json.decode, done.stdout, type=Polled)
                self._failures, self.backend = 0, f"pyslurm {polled.version}"
                self.start_s = time.monotonic() - began - polled.took_s
                return polled.state
        except (OSError, msgspec.MsgspecError) as error:
            done = Done(Exit.SOFTWARE, "", str(error))
        reason, self.start_s = _last_words(done), time.monotonic() - began
        if done.code == Exit.CONFIG:
            self._not_before = float("inf")  # until the cluster has another version
            self.backend = f"command line ({reason})"
        elif done.code != Exit.UNAVAILABLE:
            self._failed(reason)
        if done.code in (Exit.UNAVAILABLE, None):
            raise SlurmUnavailable(f"pyslurm: {reason}; check slurmctld with `scontrol ping`")
        return None

    def _failed(self, reason: str) -> None:
        delay = min(RETRY_S * 2.0 ** min(self._failures, 20), RETRY_MAX_S)
        self._failures += 1
        self._not_before = time.monotonic() + delay
        self.backend = f"command line (pyslurm: {reason}; tried again in {delay:g} s)"


def _last_words(done: Done) -> str:
    """Why there is no answer: what was said last, and how it ended."""
    said = done.stderr.strip().splitlines()[-1:]
    if done.code is not None and done.code < 0:
        said.append(f"(killed by {signal.Signals(-done.code).name})")
    return " ".join(said).strip() or f"exit code {done.code}"
