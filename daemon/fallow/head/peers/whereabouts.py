"""The head's key, port and address, and the file in which peers find them."""

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
"""Longest wait for Slurm's answer where slurmctld is. Then the head starts without the answer."""

DEFAULT_ROUTE = "192.0.2.1"
"""An address that no host has (RFC 5737), to find the default route. No packet is sent to it."""


def own_keys(paths: Paths) -> KeyPair:
    """Read or make the head's keys. They stay the same for a state folder, so that agents recognise later heads."""
    if paths.head_key.exists():
        secret = read_private(paths.head_key).decode()
        return KeyPair(public_of(secret), secret)
    keys = new_keypair()
    write_private(paths.head_key, keys.secret.encode())
    return keys


def former_port(paths: Paths) -> int | None:
    """Port of the former head, which peers try first; None: no former head is known."""
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
    """The address at which compute nodes reach this head. Without Slurm every node is this host.

    Args:
        slurm: client that knows the hosts of slurmctld; None: there is no Slurm.

    Raises:
        FallowError: this host has no network address.
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
    """The local address that leads to slurmctld's hosts, and so most likely to the nodes; None: there is none.

    Next come the address of the host's own name (127.0.1.1 on Debian), the default route, and any interface.
    """
    own_name_address = own_address()
    candidates = [
        *(address for host in controllers for address in _towards(host)),
        *([own_name_address] if own_name_address else []),
        *_towards(DEFAULT_ROUTE),
        *(one.address for one in interfaces()),
    ]
    return head_address(candidates)


def _towards(host: str) -> list[str]:
    with contextlib.suppress(FallowError):
        return [local_address_towards(host)]
    return []
