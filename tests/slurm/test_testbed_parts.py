"""Parts of the testbed that need no Slurm: registry, ports, configuration files."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from fallow.model import FallowError
from fallow.testbed import registry
from fallow.testbed.conf import Layout, Profile, cgroup_conf, gres_conf, slurm_conf
from fallow.testbed.host import clean_environment, free_ports, parse_version


def record_in(folder: Path) -> registry.Record:
    folder.mkdir()
    return registry.Record(
        folder=str(folder),
        user="me",
        nodes=2,
        gpus=0,
        profile="plain",
        bf_interval=1,
        first_port=20_000,
        version=(22, 5),
        started_at=time.time(),
    )


def test_registry_drops_what_is_gone_and_leaves_other_hosts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    here, gone, there = (record_in(tmp_path / name) for name in ("here", "gone", "there"))
    registry.write_record(here)
    registry.write_record(gone)
    with monkeypatch.context() as other:
        other.setattr(socket, "gethostname", lambda: "other-host")
        registry.write_record(there)
        assert registry.records() == [there]
    (tmp_path / "gone" / registry.RECORD).unlink()
    (tmp_path / "there" / registry.RECORD).unlink()
    assert registry.records() == [here]
    assert len(list((tmp_path / "state" / "testbeds").glob("*.json"))) == 2, "the other host's entry stays"
    registry.forget(tmp_path / "here")
    registry.forget(tmp_path / "here")
    assert registry.records() == []


def test_ports_are_free_and_apart() -> None:
    with socket.socket() as taken:
        first = free_ports(1)
        taken.bind(("", first))
        taken.listen()
        with pytest.raises(FallowError, match="free neighbouring ports"):
            free_ports(1, [range(20_000, first), range(first + 1, 32_000)])
    assert free_ports(8, [range(20_000, 31_980)]) >= 31_980


def layout(**fields: object) -> Layout:
    values = {
        "folder": Path("/t"),
        "user": "me",
        "nodes": 4,
        "gpus": 4,
        "profile": Profile.PREEMPT,
        "bf_interval": 1,
        "first_port": 20_000,
        "version": (22, 5),
        **fields,
    }
    return Layout(**values)  # type: ignore[arg-type]


def test_configuration_follows_the_layout() -> None:
    text = slurm_conf(layout())
    assert "Port=[20001-20004]" in text and "NodeName=n[1-4]" in text and "Gres=gpu:4" in text
    assert gres_conf(layout()) == "AutoDetect=off\nNodeName=n[1-4] Name=gpu File=/t/gpu[0-3]\n"
    small = layout(nodes=1, gpus=0, profile=Profile.PLAIN)
    text = slurm_conf(small)
    assert "Port=20001 " in text and "gpu" not in text and "Preempt" not in text and "scavenge" not in text
    assert gres_conf(small) == ""
    assert "File=/t/gpu0\n" in gres_conf(layout(gpus=1))
    assert "CgroupPlugin=disabled" in cgroup_conf((25, 11)) and "CgroupPlugin" not in cgroup_conf((23, 2))


def test_versions() -> None:
    assert parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert parse_version("slurm 25.11.0-0rc1\n") == (25, 11)


def test_environment_of_commands_forgets_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("FALLOW_TESTBED", "/other")
    environment = clean_environment(Path("/t/slurm.conf"))
    assert environment["SLURM_CONF"] == "/t/slurm.conf" and "PATH" in environment
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "FALLOW_TESTBED"} & set(environment)
    assert clean_environment(Path("/t/slurm.conf"), Path("/t"))["FALLOW_TESTBED"] == "/t"
