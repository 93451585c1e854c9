"""Which address and ports are listened on: tables of interfaces in, one address out; and real sockets for ports."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import msgspec
import pytest

from fallow.config import Config, Network, load_config
from fallow.core.checks.network import Interface, data_address, head_address, is_named, port_range
from fallow.head.peers.whereabouts import find_address
from fallow.model import ClusterConfig, DataNetwork, Exit, FallowError
from fallow.wire.address import interfaces, listen, local_address_towards

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
    ("candidates", "address"),
    [
        (["10.77.0.3", "127.0.1.1", "192.168.0.3"], "10.77.0.3"),
        (["127.0.1.1", "192.168.0.3"], "192.168.0.3"),
        (["::1", "fe80::1", "fd77::3"], "fd77::3"),
        (["127.0.1.1", "127.0.0.1"], "127.0.1.1"),
        ([], None),
    ],
)
def test_the_heads_address_is_one_that_others_reach_if_there_is_one(candidates: list[str], address: str | None) -> None:
    assert head_address(candidates) == address


class Slurm:
    """Says where slurmctld is."""

    def __init__(self, *controllers: str, fails: bool = False) -> None:
        self._controllers, self._fails = list(controllers), fails

    async def config(self) -> ClusterConfig:
        if self._fails:
            raise FallowError("slurmctld does not answer", Exit.UNAVAILABLE)
        return ClusterConfig(cluster="c", slurm_version="22.05.8", controllers=self._controllers)


@pytest.mark.parametrize("slurm", [Slurm("10.77.0.1"), Slurm("127.0.0.1", "10.77.0.1")])
async def test_the_host_name_does_not_decide_where_slurmctld_does(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has `127.0.1.1 login`."""
    leads = {"10.77.0.1": "10.77.0.3", "127.0.0.1": "127.0.0.1", "192.0.2.1": "192.168.7.7"}
    monkeypatch.setattr("fallow.wire.address.resolve", lambda host: "127.0.1.1")
    monkeypatch.setattr("fallow.head.peers.whereabouts.local_address_towards", leads.__getitem__)
    assert await find_address(slurm) == "10.77.0.3"  # type: ignore[arg-type]


async def test_without_slurms_answer_the_default_route_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.wire.address.resolve", lambda host: "127.0.1.1")
    monkeypatch.setattr("fallow.head.peers.whereabouts.local_address_towards", {"192.0.2.1": "192.168.7.7"}.__getitem__)
    assert await find_address(Slurm(fails=True)) == "192.168.7.7"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "pattern", "named"),
    [
        ("eth0", "eth", True),
        ("eth0", "ib,eth", True),
        ("eth10", "eth1", True),
        ("eth10", "=eth1", False),
        ("eth1", "=eth0,eth1", True),
        ("eth0", "^docker,lo", True),
        ("docker0", "^docker,lo", False),
        ("eth10", "^=eth1", True),
        ("eth1", "^=eth1", False),
        ("lo", "^docker", False),
        ("lo", "lo", True),
    ],
)
def test_names_of_interfaces_are_read_as_nccl_reads_them(name: str, pattern: str, named: bool) -> None:
    assert is_named(name, pattern) is named


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


def test_where_the_head_is_reached_over_loopback_all_is_on_this_host() -> None:
    assert data_address(HOST, "127.0.0.1", DataNetwork(interface="none"), {"NCCL_SOCKET_IFNAME": "ib7"}) == "127.0.0.1"


def test_this_hosts_interfaces_have_the_addresses_that_packets_leave_from() -> None:
    found = interfaces()
    assert Interface("lo", "127.0.0.1") in found
    assert local_address_towards("127.0.0.1") in [one.address for one in found]
    assert {one.name for one in found} <= {name for _, name in socket.if_nameindex()}


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


@pytest.mark.parametrize("size", [2, 6])
def test_a_groups_listeners_are_all_within_the_range(size: int) -> None:
    """gloo's own and the streams'; all members have the same address, so their ports alone tell them apart."""
    torch = pytest.importorskip("torch")
    import psutil

    from fallow.worker.transport.build import build_group
    from fallow.worker.transport.group import Group

    ports, before = free_range(64), listening()
    store = torch.distributed.HashStore()
    groups: dict[int, Group] = {}

    def build(rank: int) -> None:
        groups[rank] = build_group(1, rank, size, store, "127.0.0.1", 30.0, ports=ports)
        tensor = torch.full((1000,), float(rank + 1))
        groups[rank].sum(tensor)
        groups[rank].wait_and_verify()
        assert tensor.tolist() == [size * (size + 1) / 2] * 1000

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    try:
        assert sorted(groups) == list(range(size))
        opened = listening() - before
        assert len(opened) == 2 * size, opened
        assert opened <= set(ports)
        # Each connection leads to one of them, too.
        own = psutil.Process().net_connections("tcp")
        joined = [one for one in own if one.status == psutil.CONN_ESTABLISHED and one.raddr.ip == "127.0.0.1"]
        assert any(one.raddr.port in ports for one in joined)
    finally:
        for group in groups.values():
            group.interrupt("over")
        for rank in sorted(groups, reverse=True):  # here and now: gloo may not be at it when this process ends
            groups[rank].destroy()


def test_a_group_whose_range_is_full_says_so() -> None:
    torch = pytest.importorskip("torch")
    from fallow.worker.transport.build import build_group

    ports = free_range(1)
    with (
        socket.create_server(("127.0.0.1", ports[0])),
        pytest.raises(FallowError, match=f"all ports {ports[0]}-{ports[0]} of 127.0.0.1 are taken"),
    ):
        build_group(1, 0, 2, torch.distributed.HashStore(), "127.0.0.1", 5.0, ports=ports)


def test_a_listener_that_closes_meanwhile_is_not_taken_for_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one gets its descriptor, or that of another."""
    pytest.importorskip("torch")
    from torch.distributed import ProcessGroupGloo

    from fallow.worker.transport.gloo_port import device_within

    closing, real = [socket.create_server(("127.0.0.1", 0)) for _ in range(10)], ProcessGroupGloo.create_device

    def create_device(**settings: object) -> object:
        for one in closing:
            one.close()
        return real(**settings)

    monkeypatch.setattr(ProcessGroupGloo, "create_device", staticmethod(create_device))
    ports = free_range(50)
    device, _, port = device_within("127.0.0.1", ports)
    assert port in ports
    assert port in listening()
    del device


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


def test_slurmctlds_hosts_are_read() -> None:
    from fallow.slurm import parse

    config, _ = parse.config(
        "SlurmctldHost[0]        = ctl(10.77.0.1)\nSlurmctldHost[1] = login2\nSlurmctldPort = 6817\n"
    )
    assert config.controllers == ["10.77.0.1", "login2"]
    assert msgspec.json.decode(msgspec.json.encode(config), type=ClusterConfig) == config
