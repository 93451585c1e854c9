"""Where peers find the head: its key, its port, and the file that tells them."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence

import msgspec
import structlog

from fallow import __version__
from fallow.core.checks.network import head_address, is_loopback
from fallow.files import Paths, read_private, write_private, write_struct
from fallow.model import DataNetwork, Exit, FallowError, HeadFile
from fallow.slurm.paced import PacedClient
from fallow.wire.address import interfaces, local_address_towards, own_address
from fallow.wire.keys import KeyPair, new_keypair, public_of

log = structlog.get_logger("fallow.head")

ASK_S = 15.0
"""The head starts after this though Slurm has not said where slurmctld is."""

DEFAULT_ROUTE = "192.0.2.1"
"""An address that nobody has (RFC 5737): packets to it would take the default route. None is sent."""


def own_keys(paths: Paths) -> KeyPair:
    """The head's key lives as long as the state folder, so that agents find the same head again."""
    if paths.head_key.exists():
        secret = read_private(paths.head_key).decode()
        return KeyPair(public_of(secret), secret)
    keys = new_keypair()
    write_private(paths.head_key, keys.secret.encode())
    return keys


def former_port(paths: Paths) -> int | None:
    """The port of the head before us, so that its peers need not look for us; None if there was none."""
    with contextlib.suppress(FallowError, OSError, ValueError, msgspec.MsgspecError):
        former = msgspec.json.decode(read_private(paths.head_file), type=HeadFile)
        return int(former.endpoint.rsplit(":", 1)[1])
    return None


def write_head_file(
    paths: Paths, endpoint: str, public_key: str, term: int, *, network: DataNetwork, stand_in: bool = False
) -> None:
    """Tell agents and commands where this head is."""
    head = HeadFile(
        version=__version__,
        host=os.uname().nodename,
        pid=os.getpid(),
        term=term,
        endpoint=endpoint,
        public_key=public_key,
        control=str(paths.control),
        started_at=time.time(),
        network=network,
        stand_in=stand_in,
    )
    write_struct(paths.head_file, head)


async def find_address(slurm: PacedClient | None) -> str:
    """The address on which compute nodes find this head. Without Slurm every node is this host.

    Args:
        slurm: is asked where slurmctld is; None: there is no Slurm.

    Raises:
        FallowError: this host has no address at all.
    """
    if slurm is None:
        return own_address() or "127.0.0.1"
    controllers: list[str] = []
    try:
        async with asyncio.timeout(ASK_S):
            controllers = (await slurm.config()).controllers
    except (FallowError, TimeoutError) as error:
        log.warning("head.address", error=str(error) or "Slurm does not answer", advice="this host's name decides")
    address = await asyncio.to_thread(address_towards, controllers)
    if address is None:
        raise FallowError("this host has no network address; set address under [head]", Exit.CONFIG)
    if is_loopback(address):
        log.warning("head.loopback", address=address, advice="other nodes cannot reach it: set address under [head]")
    return address


def address_towards(controllers: Sequence[str]) -> str | None:
    """The local address that leads to slurmctld's hosts, so in all likelihood to the nodes; None: there is none.

    The host's own name does not do: Debian has it stand for 127.0.1.1. It comes second, then the default route, then
    any interface.
    """
    named = own_address()
    candidates = [
        *(address for host in controllers for address in _towards(host)),
        *([named] if named else []),
        *_towards(DEFAULT_ROUTE),
        *(one.address for one in interfaces()),
    ]
    return head_address(candidates)


def _towards(host: str) -> list[str]:
    with contextlib.suppress(FallowError):
        return [local_address_towards(host)]
    return []
