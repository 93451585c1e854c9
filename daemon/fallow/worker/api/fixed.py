"""A fixed world without a head: plain `python`, `torchrun`, or `srun` with the usual variables."""

import os
from typing import NamedTuple

from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fallow.core.checks.network import data_address
from fallow.model import DataNetwork, Exit, FallowError
from fallow.wire.address import interfaces, local_address_towards
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

_TIMEOUT_S = 300.0


class World(NamedTuple):
    """Rank and size from the launcher."""

    rank: int
    size: int


def world_from_environment() -> World:
    """Read RANK and WORLD_SIZE (torchrun), else SLURM_PROCID and SLURM_NTASKS with MASTER_ADDR (srun).

    Without these variables the world is one process.

    Raises:
        FallowError: the variables contradict each other.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        pair = env["RANK"], env["WORLD_SIZE"]
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "MASTER_ADDR" in env:
        pair = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    else:
        return World(0, 1)
    try:
        world = World(int(pair[0]), int(pair[1]))
    except ValueError:
        world = World(-1, 0)
    if not 0 <= world.rank < world.size:
        raise FallowError(
            f"rank {pair[0]} is not below world size {pair[1]}. Start the script with torchrun, srun or fallow run, or "
            "unset RANK and WORLD_SIZE",
            Exit.USAGE,
        )
    return world


def build_world(world: World) -> Group:
    """Build the group of a fixed world, for host tensors. The ranks meet through MASTER_ADDR and MASTER_PORT.

    Raises:
        FallowError: the ranks did not meet, or the script has made a process group with another rank or size.
    """
    _check_own_group(world)
    if world.size == 1:
        return Group(0, 0, 1, None)
    os.environ.setdefault("RANK", str(world.rank))
    os.environ.setdefault("WORLD_SIZE", str(world.size))
    try:
        store, rank, size = next(iter(rendezvous("env://")))
    except (ValueError, RuntimeError) as error:
        raise FallowError(
            f"rank {world.rank} of {world.size} cannot meet the others: {error}; set MASTER_ADDR and MASTER_PORT",
            Exit.UNAVAILABLE,
        ) from None
    local_address = local_address_towards(os.environ["MASTER_ADDR"])
    address = data_address(interfaces(), local_address, DataNetwork(), os.environ)
    return build_group(0, rank, size, PrefixStore("fallow", store), address, _TIMEOUT_S)


def _check_own_group(world: World) -> None:
    """Raise if the script's own process group has another rank or size: each rank would train a model by itself."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = World(distributed.get_rank(), distributed.get_world_size())
    if own != world:
        raise FallowError(
            f"the script's init_process_group made this process rank {own.rank} of {own.size}, the environment says "
            f"{world.rank} of {world.size}: leave init_process_group out and start all ranks with torchrun, or with "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each",
            Exit.USAGE,
        )
