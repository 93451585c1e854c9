"""Which `SlurmClient` a configuration gets."""

from __future__ import annotations

import importlib.util
from typing import Literal

from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmClient
from fallow.slurm.pyslurm_client import PyslurmClient


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
