"""Slurm through pyslurm for the polls, and through its commands for the rest.

Polls are most of the requests. The rest is rare, and the commands do it better:
- pyslurm cannot submit heterogeneous jobs, or ask when a job would start.
- For a plain job, pyslurm cannot say `--mem=0` or `--propagate=NONE`, and it runs none of the site's SPANK and
  cli_filter plugins. A harvest job would differ from one of the user's own sbatch.
- pyslurm's result of a cancellation may belong to another cancellation.
- Only `scontrol show config` shows slurmctld's clock.
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
from fallow.slurm.process import CommandResult, query_environment, run
from fallow.slurm.pyslurm_poll import Polled
from fallow.slurm.state import on_our_clock

RETRY_S, RETRY_MAX_S = 5.0, 300.0
BEGIN_S = 5.0
"""Seconds after which a process that has not imported pyslurm is given up, unless only pyslurm may answer polls."""


def slurm_client(setting: Literal["auto", "cli", "pyslurm"]) -> SlurmClient:
    """The client for a setting. `auto`: pyslurm if it imports and is for the cluster's version, else the commands.

    pyslurm is looked for, not imported: the import may end the process.
    """
    if setting == "cli":
        return CliClient(why="as configured")
    spec = importlib.util.find_spec("pyslurm")
    if setting == "auto" and (spec is None or spec.origin is None):
        return CliClient(why="pyslurm is not installed")
    return PyslurmClient(insist=setting == "pyslurm")


class PyslurmClient(CliClient):
    """`CliClient` that polls through pyslurm, each time in a new process (`pyslurm_poll`).

    After a failed poll the commands answer for a while, and `backend` says why.

    Args:
        conf: the slurm.conf to use; None: as the environment says.
        insist: True: the commands never answer a poll; a failed poll raises SlurmUnavailable.
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
        "version of the cluster's Slurm; None: not known yet"
        self._failures = 0
        self._not_before = 0.0
        self.backend = "pyslurm, not asked yet"

    async def config(self) -> ClusterConfig:
        config = await super().config()
        if config.slurm_version != self._version:
            self._version, self._not_before = config.slurm_version, 0.0
        return config

    async def poll(self) -> ClusterState:
        self.start_s = 0.0
        state = await self._ask() if time.monotonic() >= self._not_before else None
        if state is not None:
            # In a thread, like the commands' answers.
            return await asyncio.to_thread(on_our_clock, state, steady(), self.clock_offset_s)
        if self._insist:
            raise SlurmUnavailable(f'{self.backend}; repair it, or set [slurm] client = "auto"')
        return await super().poll()

    async def _ask(self) -> ClusterState | None:
        """Poll through pyslurm, on slurmctld's clock; None: pyslurm cannot, ask the commands.

        Raises:
            SlurmUnavailable: slurmctld did not answer, and would not answer the commands either.
        """
        if self._version is None:
            await self.config()
        command = [sys.executable, "-Pm", "fallow.slurm.pyslurm_poll", self._version or "", __version__]
        began = time.monotonic()
        try:
            result = await run(
                command,
                environment=query_environment(self.conf),
                timeout_s=self._query_timeout_s,
                begin_s=None if self._insist else BEGIN_S,
            )
            if result.code == 0:
                polled = await asyncio.to_thread(msgspec.json.decode, result.stdout, type=Polled)
                self._failures, self.backend = 0, f"pyslurm {polled.version}"
                self.start_s = time.monotonic() - began - polled.took_s
                return polled.state
        except (OSError, msgspec.MsgspecError) as error:
            result = CommandResult(Exit.SOFTWARE, "", str(error))
        reason, self.start_s = _last_words(result), time.monotonic() - began
        if result.code == Exit.CONFIG:
            self._not_before = float("inf")  # until the cluster has another version
            self.backend = f"command line ({reason})"
        elif result.code != Exit.UNAVAILABLE:
            self._note_failure(reason)
        if result.code in (Exit.UNAVAILABLE, None):
            raise SlurmUnavailable(f"pyslurm: {reason}; check slurmctld with `scontrol ping`")
        return None

    def _note_failure(self, reason: str) -> None:
        delay = min(RETRY_S * 2.0 ** min(self._failures, 20), RETRY_MAX_S)
        self._failures += 1
        self._not_before = time.monotonic() + delay
        self.backend = f"command line (pyslurm: {reason}; next try in {delay:g} s)"


def _last_words(result: CommandResult) -> str:
    """Why there is no answer: the last line of the output, and how the process ended."""
    lines = result.stderr.strip().splitlines()[-1:]
    if result.code is not None and result.code < 0:
        lines.append(f"(killed by {signal.Signals(-result.code).name})")
    return " ".join(lines).strip() or f"exit code {result.code}"
