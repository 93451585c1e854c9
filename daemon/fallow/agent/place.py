"""Where this agent is: its node, its Slurm job, how many workers go here and what each of them gets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from fallow.model import HeadFile, KeyFile
from fallow.wire.address import host_of, local_address_towards

_NO_DEVICES = ("", "NoDevFiles", "-1")


@dataclass(frozen=True)
class Place:
    """One node of an allocation, as its agent sees it."""

    node: str
    job_id: str
    slots: int
    devices: tuple[str, ...]
    "entries of CUDA_VISIBLE_DEVICES; empty: no GPUs"
    address: str
    "local address from which packets to the head leave"

    def environment(self, index: int) -> dict[str, str]:
        """What worker number `index` of this node gets: its rank here and its share of the devices."""
        found = {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(self.slots)}
        if self.devices:
            # It sees only its own share, so the usual set_device(LOCAL_RANK) has to mean the first of those.
            found["LOCAL_RANK"] = "0"
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self._share(index))
        return found

    def _share(self, index: int) -> tuple[str, ...]:
        devices = self.devices
        if len(devices) < self.slots:
            # More workers than devices was asked for: they share.
            return (devices[index % len(devices)],)
        # No device is left over: where they do not divide evenly, some workers have one more.
        first, end = (len(devices) * number // self.slots for number in (index, index + 1))
        return devices[first:end]


def look_around(keys: KeyFile, head: HeadFile, environ: Mapping[str, str] = os.environ) -> Place:
    """Find out from the environment that Slurm (or `fallow local`) made."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = () if visible in _NO_DEVICES else tuple(part.strip() for part in visible.split(","))
    # In a heterogeneous job the leader's id names the allocation.
    for name in ("SLURM_HET_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID"):
        job_id = environ.get(name)
        if job_id:
            break
    return Place(
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        job_id=job_id or f"local-{os.getpid()}",
        slots=keys.workers_per_node or len(devices) or 1,
        devices=devices,
        address=local_address_towards(host_of(head.endpoint)),
    )
