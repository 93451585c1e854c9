"""Parts of the testbed that need no Slurm: registry, ports, configuration files."""

import shutil
import socket
import time
from pathlib import Path

import pytest

from fallow.model import FallowError, slurm_release
from fallow.testbed import registry
from fallow.testbed.conf import Layout, Profile, cgroup_conf, gres_conf, slurm_conf
from fallow.testbed.host import clean_environment, free_ports, reserved_ports


def layout(place: Path = Path("/t"), **fields: object) -> Layout:
    values: dict[str, object] = {"user": "me", "nodes": 4, "gpus": 4, "profile": Profile.PREEMPT, "bf_interval": 1}
    values |= {"first_port": 20_000, "version": (22, 5), "started_at": time.time(), **fields}
    return Layout(place=str(place), **values)  # type: ignore[arg-type]


def test_registry_drops_what_is_gone_and_leaves_other_hosts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    local_testbed, removed_testbed, remote_testbed = (layout(tmp_path / name) for name in ("here", "gone", "there"))
    for each in (local_testbed, removed_testbed, remote_testbed):
        each.folder.mkdir()
    registry.remember(local_testbed)
    registry.remember(removed_testbed)
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "other-host")
        registry.remember(remote_testbed)
        assert registry.layouts() == [remote_testbed]
    shutil.rmtree(removed_testbed.folder)
    assert registry.layouts() == [local_testbed]
    registry.forget(local_testbed.folder)
    registry.forget(local_testbed.folder)
    assert registry.layouts() == []
    monkeypatch.setattr(socket, "gethostname", lambda: "other-host")
    assert registry.layouts() == [remote_testbed]


def test_reserved_ports_are_neighbours_that_nobody_else_finds_and_daemons_listen_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserved_ports(2) as first, socket.socket() as daemon:
        monkeypatch.setattr("fallow.testbed.host._PORTS", range(first, first + 2))
        for count in (1, 2):
            with pytest.raises(FallowError, match=f"no {count} free neighbouring ports"):
                free_ports(count)
        daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        daemon.bind(("", first + 1))
        daemon.listen()
        with pytest.raises(FallowError, match="no 1 free"):
            free_ports(1)


def test_configuration_follows_the_layout() -> None:
    text = slurm_conf(layout())
    assert "Port=[20001-20004]" in text and "NodeName=n[1-4]" in text and "Gres=gpu:4" in text
    assert gres_conf(layout()) == "AutoDetect=off\nNodeName=n[1-4] Name=gpu File=/t/gpu[0-3]\n"
    small = layout(nodes=1, gpus=0, profile=Profile.PLAIN)
    text = slurm_conf(small)
    assert "Port=20001 " in text and "gpu" not in text and "Preempt" not in text and "scavenge" not in text
    assert gres_conf(small) == ""
    assert "File=/t/gpu0\n" in gres_conf(layout(gpus=1))
    assert slurm_release("slurm-wlm 22.05.8") == (22, 5)
    assert slurm_release("slurm 25.11.0-0rc1\n") == (25, 11)
    assert "CgroupPlugin=disabled" in cgroup_conf((25, 11))
    assert "CgroupPlugin" not in cgroup_conf((23, 2))


def test_environment_of_commands_forgets_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("FALLOW_TESTBED", "/other")
    environment = clean_environment(Path("/t/slurm.conf"))
    assert environment["SLURM_CONF"] == "/t/slurm.conf" and "PATH" in environment
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "FALLOW_TESTBED"} & set(environment)
    assert clean_environment(Path("/t/slurm.conf"), Path("/t"))["FALLOW_TESTBED"] == "/t"
