"""Which address and which ports this process listens on. Pure: interfaces and settings in, one address out.

`GLOO_SOCKET_IFNAME` names interfaces, as in torch: exactly, with commas. `NCCL_SOCKET_IFNAME` follows NCCL's
documentation: prefixes with commas; `=` in front means exact names, `^` all but those, `^=` all but those exact names.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fallow.model import DataNetwork, Exit, FallowError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_PORTS = re.compile(r"(\d{1,5})\s*-\s*(\d{1,5})")


class Interface(NamedTuple):
    """One address of a network interface of this host."""

    name: str
    address: str


def head_address(candidates: Sequence[str]) -> str | None:
    """The first candidate that other hosts may reach, else a loopback address; None: no candidates."""
    reachable = [address for address in candidates if not is_loopback(address) and not _is_link_local(address)]
    return next(iter([*reachable, *candidates]), None)


def data_address(
    interfaces: Sequence[Interface], towards_head: str, setting: DataNetwork, environ: Mapping[str, str]
) -> str:
    """The address on which this member listens for other members.

    The job's own variables override the configuration. Without both, it is the local address that leads to the head. If
    the head is reached over loopback, all members are on this host, and loopback is right.

    Args:
        interfaces: of this host.
        towards_head: the local address from which packets to the head leave.
        setting: `[network]` of the head's configuration.
        environ: of the job.

    Raises:
        FallowError: no interface matches the variables or the setting.
    """
    if is_loopback(towards_head):
        return towards_head
    if names := environ.get(GLOO):
        request, matches = f"{GLOO}={names}", [i for i in interfaces if i.name in _split(names)]
    elif pattern := environ.get(NCCL):
        request, matches = f"{NCCL}={pattern}", [i for i in interfaces if is_named(i.name, pattern)]
    elif setting.interface or setting.subnet:
        texts = {"interface": setting.interface, "subnet": setting.subnet}
        request = "[network] " + " and ".join(f"{key} = {text}" for key, text in texts.items() if text)
        matches = [
            i
            for i in interfaces
            if (not setting.interface or is_named(i.name, setting.interface))
            and (not setting.subnet or _is_within(i.address, setting.subnet))
        ]
    else:
        return towards_head
    addresses = [one.address for one in matches if not _is_link_local(one.address)]
    if towards_head in addresses:
        return towards_head
    same_family = [address for address in addresses if (":" in address) == (":" in towards_head)]
    for address in [*same_family, *addresses]:
        return address
    available = ", ".join(f"{one.name} {one.address}" for one in interfaces) or "none"
    raise FallowError(
        f"{request}: no network interface of this node matches. Name one that all nodes have (here: {available})",
        Exit.CONFIG,
    )


def is_named(name: str, pattern: str) -> bool:
    """True if NCCL would take the interface `name` under `NCCL_SOCKET_IFNAME=pattern`."""
    excludes = pattern.startswith("^")
    words = pattern.removeprefix("^")
    exact = words.startswith("=")
    names = _split(words.removeprefix("="))
    hit = name in names if exact else any(name.startswith(prefix) for prefix in names)
    # An exclusion never leaves loopback, because other nodes cannot reach it.
    return (not hit and name != "lo") if excludes else hit


def port_range(text: str) -> range:
    """The ports of a text like `20000-20100`.

    Raises:
        ValueError: the text is not a range of ports.
    """
    match = _PORTS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"{text!r} is not a range of ports; write FIRST-LAST, for example 20000-20100")
    return range(first, last + 1)


def is_loopback(address: str) -> bool:
    """True for an address that no other host can reach."""
    return ipaddress.ip_address(address).is_loopback


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


def _is_within(address: str, subnet: str) -> bool:
    one, network = ipaddress.ip_address(address), ipaddress.ip_network(subnet, strict=False)
    return one.version == network.version and one in network


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]
