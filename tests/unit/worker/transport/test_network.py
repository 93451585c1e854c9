"""Which address and ports are listened on: tables of interfaces in, one address out; and real sockets for ports."""

import contextlib
import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from fallow.config import Config, Network, load_config
from fallow.core.checks.network import Interface, data_address, port_range
from fallow.head.peers.whereabouts import find_address
from fallow.model import DataNetwork, FallowError
from fallow.slurm import parse
from fallow.wire.address import allow_connections, listen

HOST = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.77.0.11"),
    Interface("eth1", "10.78.0.11"),
    Interface("eth10", "10.79.0.11"),
    Interface("eth1", "fe80::1"),
    Interface("ib0", "fd78::11"),
]
MGMT = "10.77.0.11"


@pytest.mark.parametrize(
    ("controllers", "address"),
    [(["ctl(10.77.0.1)"], "10.77.0.3"), (["127.0.0.1", "10.77.0.1"], "10.77.0.3"), ([], "192.168.7.7")],
)
async def test_the_host_name_does_not_decide_the_heads_address_where_slurmctld_or_the_default_route_does(
    controllers: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has `127.0.1.1 login`."""
    config, _ = parse.config("".join(f"SlurmctldHost[{n}] = {host}\n" for n, host in enumerate(controllers)))
    slurm = AsyncMock()
    slurm.config.return_value = config
    leads = {"10.77.0.1": "10.77.0.3", "127.0.0.1": "127.0.0.1", "192.0.2.1": "192.168.7.7"}
    monkeypatch.setattr("fallow.wire.address.resolve", lambda host: "127.0.1.1")
    monkeypatch.setattr("fallow.head.peers.whereabouts.local_address_towards", leads.__getitem__)
    assert await find_address(slurm) == address


@pytest.mark.parametrize(
    ("environ", "setting", "address"),
    [
        ({}, DataNetwork(), MGMT),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, DataNetwork(), "10.78.0.11"),
        ({"GLOO_SOCKET_IFNAME": "ib0,eth1"}, DataNetwork(), "10.78.0.11"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, DataNetwork(), "10.78.0.11"),
        ({"NCCL_SOCKET_IFNAME": "^eth0"}, DataNetwork(), "10.78.0.11"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, DataNetwork(), MGMT),
        ({"NCCL_SOCKET_IFNAME": "ib"}, DataNetwork(), "fd78::11"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth10"}, DataNetwork(), "10.79.0.11"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, DataNetwork(interface="eth1"), MGMT),
        ({}, DataNetwork(interface="=eth1"), "10.78.0.11"),
        ({}, DataNetwork(subnet="10.78.0.0/24"), "10.78.0.11"),
        ({}, DataNetwork(subnet="10.76.0.0/14"), MGMT),
        ({}, DataNetwork(interface="eth1", subnet="10.79.0.0/24"), "10.79.0.11"),
    ],
)
def test_the_data_planes_address(environ: dict[str, str], setting: DataNetwork, address: str) -> None:
    assert data_address(HOST, MGMT, setting, environ) == address


@pytest.mark.parametrize(
    ("environ", "setting", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth"}, DataNetwork(), "GLOO_SOCKET_IFNAME=eth: no network interface"),
        ({"NCCL_SOCKET_IFNAME": "bond"}, DataNetwork(), "NCCL_SOCKET_IFNAME=bond: no network interface"),
        ({}, DataNetwork(subnet="10.80.0.0/24"), "[network] subnet = 10.80.0.0/24: no network interface"),
    ],
)
def test_an_interface_that_is_not_there_is_named(environ: dict[str, str], setting: DataNetwork, words: str) -> None:
    with pytest.raises(FallowError) as raised:
        data_address(HOST, MGMT, setting, environ)
    assert raised.value.message.startswith(words)
    assert "eth1 10.78.0.11" in raised.value.message


@pytest.mark.parametrize("text", ["", "20000", "20100-20000", "0-5", "1-65536", "a-b"])
def test_what_is_no_range_of_ports_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FIRST-LAST"):
        port_range(text)
    if text:
        with pytest.raises(FallowError, match=r"FALLOW_NETWORK__HEAD_PORTS: \[network\] head_ports: "):
            load_config({"FALLOW_NETWORK__HEAD_PORTS": text, "HOME": str(tmp_path)}, tmp_path / "none")


def test_the_section_is_read_and_told(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[network]\ninterface = "ib0"\nsubnet = "10.78.0.0/24"\nmember_ports = "20000-20100"\n')
    config = load_config({"FALLOW_CONFIG": str(file)}, tmp_path / "none")
    assert config == Config(network=Network(interface="ib0", subnet="10.78.0.0/24", member_ports="20000-20100"))
    assert config.network.data == DataNetwork(interface="ib0", subnet="10.78.0.0/24", member_ports="20000-20100")
    file.write_text('[network]\nsubnet = "10.78.0/24"\n')
    with pytest.raises(FallowError, match=r"c.toml: \[network\] subnet: '10.78.0/24'"):
        load_config({"FALLOW_CONFIG": str(file)}, tmp_path / "none")


def free_range(size: int) -> range:
    """Ports below those that the kernel gives out, free now."""
    for first in range(21000, 31000, size):
        try:
            for port in range(first, first + size):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return range(first, first + size)
    raise AssertionError("no free ports")


def test_listeners_take_every_port_of_their_range_and_no_other() -> None:
    ports = free_range(3)
    taken = [listen("127.0.0.1", ports) for _ in ports]
    try:
        assert sorted(one.getsockname()[1] for one in taken) == list(ports)
        with pytest.raises(OSError, match=f"all ports {ports[0]}-{ports[-1]} of 127.0.0.1 are taken"):
            listen("127.0.0.1", ports)
    finally:
        for one in taken:
            one.close()


def test_a_member_opens_more_connections_than_its_shell_would_let_it() -> None:
    """Some hundred members need more than the usual 1,024."""
    pytest.importorskip("torch")
    from members import build_world

    usual, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 12, usual[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(8):
            os.close(held.pop())
        groups = build_world(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for file in held:
            os.close(file)
    for group in groups:
        group.interrupt("over")
    for group in reversed(groups):
        group.destroy()


def test_where_the_limit_of_open_files_cannot_be_raised_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that cannot be built for that would be voted for by nobody."""

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    allow_connections()


def test_a_groups_listeners_are_all_within_the_range(tmp_path: Path) -> None:
    """gloo's own and the streams'; all members have the same address, so their ports alone tell them apart."""
    torch = pytest.importorskip("torch")
    from fallow.nodecheck.__main__ import FolderGathers
    from fallow.worker.transport.build import build_group
    from fallow.worker.transport.group import Group
    from fallow.worker.transport.rendezvous import GatherStore

    size, ports, before = 4, free_range(64), listening()

    def build(rank: int) -> Group:
        store = GatherStore(FolderGathers(tmp_path, rank, size), range(size), 120.0)
        group = build_group(1, rank, size, store, "127.0.0.1", 120.0, ports=ports)
        tensor = torch.full((1000,), float(rank + 1))
        group.sum(tensor)
        group.wait_and_verify()
        assert tensor.tolist() == [size * (size + 1) / 2] * 1000
        return group

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(build, range(size)))
    try:
        opened = listening() - before
        assert len(opened) == 2 * size, opened
        assert opened <= set(ports)
    finally:
        for group in groups:
            group.interrupt("over")
        for group in reversed(groups):  # here and now: gloo may not be at it when this process ends
            group.destroy()


def listening() -> set[int]:
    import psutil

    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


async def test_the_head_takes_a_port_of_its_range() -> None:
    from fallow.wire.keys import new_keypair
    from fallow.wire.router import Router

    ports, keys = free_range(2), new_keypair()
    routers = [Router(keys.public, keys.secret, lambda key: False) for _ in range(3)]
    try:
        former = ports[1]
        assert await routers[0].start("127.0.0.1", former, ports) == f"tcp://127.0.0.1:{former}"
        assert await routers[1].start("127.0.0.1", 9, ports) == f"tcp://127.0.0.1:{ports[0]}"
        with pytest.raises(FallowError, match=f"all ports {ports[0]}-{ports[-1]} are taken; widen"):
            await routers[2].start("127.0.0.1", None, ports)
    finally:
        for router in routers:
            await router.close()
