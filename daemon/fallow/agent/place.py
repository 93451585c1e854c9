"""Where this agent is: its node, its Slurm job, how many workers go here and what each of them gets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fallow.core.checks.devices import Devices, visible
from fallow.core.checks.network import data_address
from fallow.model import FallowError, HeadFile, KeyFile
from fallow.wire.address import host_of, interfaces, local_address_towards

_AMD_DRIVER = Path("/dev/kfd")


@dataclass(frozen=True)
class Place:
    """One node of an allocation, as its agent sees it."""

    host: str
    "its name, unique among the agents of an allocation"
    job_id: str
    slots: int
    devices: Devices
    address: str
    "local address from which packets to the head leave"
    entry: str
    "address on which its workers listen for those of other nodes"

    def environment(self, index: int) -> dict[str, str]:
        """What worker number `index` of this node gets: its rank here and its share of the devices."""
        # It sees only its own share, so the usual set_device(LOCAL_RANK) has to mean the first of those.
        rank = 0 if self.devices.count else index
        found = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.slots)}
        return found | self.devices.share(index, self.slots)


def devices_here(environ: Mapping[str, str] = os.environ) -> Devices:
    """The GPUs of this node that Slurm has given to the job."""
    return visible(environ, amd=_AMD_DRIVER.exists())


def look_around(keys: KeyFile, head: HeadFile, environ: Mapping[str, str] = os.environ) -> Place:
    """Find out from the environment that Slurm (or `fallow local`) made."""
    devices = devices_here(environ)
    # In a heterogeneous job the leader's id names the allocation.
    names = "SLURM_HET_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID"
    job_id = next(filter(None, map(environ.get, names)), f"local-{os.getpid()}")
    address = local_address_towards(host_of(head.endpoint))
    return Place(
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        job_id=job_id,
        slots=keys.workers_per_node or devices.count or 1,
        devices=devices,
        address=address,
        entry=_entry(address, head, environ),
    )


def _entry(address: str, head: HeadFile, environ: Mapping[str, str]) -> str:
    try:
        return data_address(interfaces(), address, head.network, environ)
    except FallowError:
        return address  # the workers find no other one either, and their error is the run's
