"""One worker of the check: collects facts about its node and takes part in an all-reduce among all workers."""

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec
import torch

from fallow.core.checks.gpu_checks import AllocationFacts, AllReduceTiming, NodeFacts
from fallow.model import FallowError
from fallow.nodecheck.__main__ import MEETING_S, FolderGathers
from fallow.nodecheck.facts import look_around
from fallow.wire.address import local_address_towards, own_address
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.rendezvous import GatherStore
from fallow.worker.transport.waits import Interrupted

_BATCH = 5
"""Number of all-reduces per measurement."""
_ON_DEVICE_BYTES, _ON_HOST_BYTES = 256 << 20, 16 << 20


def work(folder: Path, measured_s: float, node: str, rank: int, size: int) -> None:
    """Connect to the other workers, measure, and write the result to stdout on rank 0. Ends the process.

    Args:
        folder: folder that all nodes see.
        measured_s: seconds of all-reduces.
        node: name of this worker's node.
        rank: rank of this worker.
        size: number of workers.
    """
    device = _device()
    store = GatherStore(FolderGathers(folder, rank, size), range(size), MEETING_S)
    try:
        group = build_group(0, rank, size, store, _address(), MEETING_S, device=device)
        facts = msgspec.json.encode(look_around(node, [device]))
        all_facts = [msgspec.json.decode(text, type=NodeFacts) for text in group.gather(facts)]
        result = AllocationFacts(_by_node(all_facts), _measure(group, device, measured_s))
    except (FallowError, Interrupted, RuntimeError) as error:
        sys.exit(f"{node}: {error}")
    if rank == 0:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()
    with contextlib.suppress(Interrupted):
        group.gather(b"")  # no worker ends before rank 0 has written the result
    os._exit(0)  # at once: gloo may end a process whose peer closes a connection first


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def _address() -> str:
    """Local address towards the node on which srun was called, or the address of this host's name."""
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    return (local_address_towards(launcher) if launcher else own_address()) or "127.0.0.1"


def _by_node(all_facts: list[NodeFacts]) -> list[NodeFacts]:
    """Merge the facts of workers on the same node: one entry per node, with the GPUs of all its workers."""
    nodes: dict[str, NodeFacts] = {}
    for facts in all_facts:
        previous = nodes.get(facts.node)
        nodes[facts.node] = (
            facts
            if previous is None
            else msgspec.structs.replace(previous, devices=[*previous.devices, *facts.devices])
        )
    return list(nodes.values())


def _measure(group: Group, device: torch.device, measured_s: float) -> AllReduceTiming | None:
    """Measure all-reduces for `measured_s` seconds. The fastest batch counts: other traffic can only slow it down."""
    if group.size == 1:
        return None
    size = _ON_HOST_BYTES if device.type == "cpu" else _ON_DEVICE_BYTES
    values = torch.zeros(size // 4, dtype=torch.float32, device=device)
    group.sum(values)  # the first all-reduce opens the connections
    group.wait_and_verify()
    began, best = time.monotonic(), float("inf")
    while True:
        batch = time.monotonic()
        for _ in range(_BATCH):
            group.sum(values)
        group.wait_and_verify()
        best = min(best, (time.monotonic() - batch) / _BATCH)
        over = group.gather(bytes([time.monotonic() - began >= measured_s]))[0]
        if over[0]:
            slowest = max(float(text) for text in group.gather(repr(best).encode()))
            return AllReduceTiming(ranks=group.size, size_bytes=size, seconds=slowest)
