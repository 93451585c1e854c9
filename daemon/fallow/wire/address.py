"""This host's addresses, and sockets that listen on one of them."""

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import random
import resource
import socket
import struct
from pathlib import Path

from fallow.core.checks.network import Interface
from fallow.model import Exit, FallowError

FILES = 65536
"""Maximum number of open files that a process asks for."""

_DISCARD_PORT = 9

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16sHH4s16x")
_INTERFACES = 256
"Maximum number of addresses to read."
_IF_INET6 = Path("/proc/net/if_inet6")


def resolve(host: str) -> str:
    """Return the first IP address of a host name, IPv4 first. Numeric addresses are returned unchanged."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise FallowError(
            f"host {host!r}: name does not resolve ({error}); set a numeric address or mend the name service",
            Exit.UNAVAILABLE,
        ) from error
    addresses = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def local_address_towards(host: str) -> str:
    """Return the local address from which packets to `host` would leave. Sends nothing."""
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
    """Return the address of this host's name; None if the name has no address or a loopback address."""
    try:
        address = resolve(socket.gethostname())
    except FallowError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def interfaces() -> list[Interface]:
    """Return all addresses of all interfaces that are up, IPv4 first, in the kernel's order (netdevice(7))."""
    buffer = bytearray(_IFREQ.size * _INTERFACES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        memory = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        request = bytearray(struct.pack("iP", len(buffer), ctypes.addressof(memory)))
        fcntl.ioctl(probe, _SIOCGIFCONF, request)
        size: int = struct.unpack_from("i", request)[0]
    rows = _IFREQ.iter_unpack(bytes(buffer[:size]))
    addresses = [
        Interface(name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(ip)) for name, _, _, ip in rows
    ]
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return addresses  # this kernel has no IPv6
    for line in lines:
        address, *_, name = line.split()
        addresses.append(Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(address)))))
    return addresses


def allow_connections() -> None:
    """Raise the limit on open files to the hard limit. Shells, and so Slurm, often set it to 1,024.

    A head also holds connections of strangers until their handshake fails. A worker has up to five connections to each
    other member while the membership changes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a sandbox forbids it, or `fs.nr_open` is below `hard`
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))


def listen(address: str, ports: range | None = None, backlog: int = 64) -> socket.socket:
    """Return a TCP socket that listens on a local address.

    Args:
        address: numeric address of this host.
        ports: ports to choose from; None: the kernel chooses.
        backlog: number of connections that may wait to be accepted.

    Raises:
        OSError: this host does not have the address, or every port of the range is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in shuffled_ports(ports):
        try:
            return socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports is None:
                raise
    assert ports is not None
    raise no_free_port(address, ports)


def shuffled_ports(ports: range | None) -> list[int]:
    """Return the ports in random order, so that two processes seldom try the same one; [0] without a range."""
    return [0] if ports is None else random.sample(ports, len(ports))


def no_free_port(address: str, ports: range) -> OSError:
    """Return the error for a range of ports without a free port."""
    text = f"all ports {ports[0]}-{ports[-1]} of {address} are taken; widen [network] member_ports"
    return OSError(errno.EADDRINUSE, text)


def host_of(endpoint: str) -> str:
    """Return the numeric host of a ZeroMQ endpoint, tcp://HOST:PORT."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit() or not host:
        raise FallowError(f"endpoint {endpoint!r}: not tcp://ADDRESS:PORT; start the head again", Exit.DATA)
    return host.strip("[]")
