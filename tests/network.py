"""A cluster's network on this machine: a hub with the head, and nodes with an address and a link of their own.

Each is a network namespace that exists as long as this process holds it, so nothing is left however the tests end. A
link between two nodes leads through the hub, where it can be cut: packets vanish, as they do behind a broken switch,
and nobody is told. A node's own link can be made slow.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HUB = "10.77.0.1"
"""The head's address."""

FAST = "10.78.0.0/24"
"""The second network, see `Network.add_fast`."""

_CLONE_NEWNET = 0x40000000
_NODE_QUEUE = 65536
"""Bytes that wait before a node's slow link; what comes when it is full is lost."""
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(Exception):
    """This machine or user may not make networks; the text says what is missing."""


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, into a network namespace, given as a path.

    Raises:
        OSError: not allowed.
    """
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


class Network:
    """A hub and some nodes, numbered from 0.

    Args:
        nodes: how many.

    Raises:
        NoNetworkError: in words, why it cannot be had here.
    """

    def __init__(self, nodes: int) -> None:
        for program in ("ip", "tc"):
            if shutil.which(program, path=program_path()) is None:
                raise NoNetworkError(f"no command `{program}` (Debian: iproute2)")
        self._files: list[int] = []
        try:
            self._home = self._hold()
            self._hub = self._new()
            self._nodes = [self._new() for _ in range(nodes)]
            self._wire()
        except OSError as error:
            self.close()
            raise NoNetworkError(f"network namespaces are not allowed here: {error}") from None
        except subprocess.CalledProcessError as error:
            self.close()
            words = " ".join(error.cmd[:4])
            raise NoNetworkError(f"the kernel lacks a kind of network device: {words}: {error.stderr}") from None

    def node(self, number: int) -> str:
        """The path of a node's namespace, for `enter`."""
        return self._nodes[number]

    @contextlib.contextmanager
    def at_the_hub(self) -> Iterator[None]:
        """Inside, this thread is in the hub, and what it starts is there for good."""
        with self._inside(self._hub):
            yield

    @contextlib.contextmanager
    def _inside(self, namespace: str) -> Iterator[None]:
        enter(namespace)
        try:
            yield
        finally:
            enter(self._home)

    def cut(self, one: int, other: int) -> None:
        """From now on nothing arrives between these two nodes, and nobody is told."""
        for source, target in ((one, other), (other, one)):
            self._do(self._hub, f"ip rule add from {address(source)} to {address(target)} blackhole")

    def unplug(self, node: int) -> None:
        """Take a node off the network: what it sends vanishes, and what is sent to it, until it is plugged in again."""
        self._drop("add", node)

    def plug(self, node: int) -> None:
        self._drop("del", node)

    def _drop(self, do: str, node: int) -> None:
        """Not by taking the link down: the hub would answer at once that the node cannot be reached."""
        for which in ("from", "to"):
            self._do(self._hub, f"ip rule {do} {which} {address(node)} blackhole")

    def slow_down_node(self, node: int, bits_per_s: int) -> None:
        """What goes to and from this node, all of it, goes no faster than that from now on, each way."""
        queue = f"rate {bits_per_s}bit burst 4000 limit {_NODE_QUEUE}"
        self._do(self._nodes[node], f"tc qdisc add dev eth0 root tbf {queue}")
        self._do(self._hub, f"tc qdisc add dev node{node} root tbf {queue}")

    def add_fast(self, name: str) -> None:
        """A second network that joins the first two nodes, without the hub: an interface of that name on each."""
        here, there = self._nodes[0], self._nodes[1]
        self._do(here, f"ip link add {name} type veth peer name {name} netns {there}")
        for number, node in enumerate((here, there)):
            self._do(node, f"ip addr add {fast_address(number)}/24 dev {name}")
            self._do(node, f"ip link set {name} up")

    def close(self) -> None:
        """Let go of the namespaces; the kernel ends them with the last process in them."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def _hold(self) -> str:
        self._files.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        return f"/proc/{os.getpid()}/fd/{self._files[-1]}"

    def _new(self) -> str:
        if _libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        try:
            return self._hold()
        finally:
            enter(self._home)

    def _wire(self) -> None:
        with self.at_the_hub():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self._do(self._hub, "ip link set lo up")
        self._do(self._hub, f"ip addr add {HUB}/32 dev lo")
        for number, node in enumerate(self._nodes):
            gate = address(number, host=1)
            self._do(self._hub, f"ip link add node{number} type veth peer name eth0 netns {node}")
            self._do(self._hub, f"ip addr add {gate}/24 dev node{number}")
            self._do(self._hub, f"ip link set node{number} up")
            self._do(node, "ip link set lo up")
            self._do(node, f"ip addr add {address(number)}/24 dev eth0")
            self._do(node, "ip link set eth0 up")
            self._do(node, f"ip route add default via {gate}")

    def _do(self, where: str, command: str) -> None:
        with self._inside(where):
            environ = {**os.environ, "PATH": program_path()}
            subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=180, env=environ)


def fast_address(node: int) -> str:
    """On the second network."""
    return f"10.78.0.{node + 1}"


def address(node: int, host: int = 2) -> str:
    """On the network that leads through the hub."""
    return f"10.77.{node + 1}.{host}"


def program_path() -> str:
    """PATH with the folders of administrators' commands and of this interpreter."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
