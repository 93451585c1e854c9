"""Which local address to listen on."""

from __future__ import annotations

import ipaddress
import socket

from fallow.model import Exit, FallowError

_DISCARD_PORT = 9


def resolve(host: str) -> str:
    """First IP address of a host name (IPv4 first); numeric addresses come back as they are."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise FallowError(
            f"host {host!r}: name does not resolve ({error}); set a numeric address or mend the name service",
            Exit.UNAVAILABLE,
        ) from error
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def local_address_towards(host: str) -> str:
    """The local address from which packets to `host` would leave. Sends nothing."""
    target = resolve(host)
    family = socket.AF_INET6 if ipaddress.ip_address(target).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _DISCARD_PORT))
        except OSError as error:
            raise FallowError(
                f"host {host!r} ({target}): no route to it ({error.strerror}); set this host's address yourself",
                Exit.UNAVAILABLE,
            ) from error
        return str(probe.getsockname()[0])


def own_address() -> str | None:
    """The address that this host's own name resolves to; None when that is loopback or nothing."""
    try:
        address = resolve(socket.gethostname())
    except FallowError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def host_of(endpoint: str) -> str:
    """The numeric host of a ZeroMQ endpoint, tcp://HOST:PORT."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit() or not host:
        raise FallowError(f"endpoint {endpoint!r}: not tcp://ADDRESS:PORT; start the head again", Exit.DATA)
    return host.strip("[]")
