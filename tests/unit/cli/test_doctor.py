"""`fallow doctor` makes all checks, and never raises."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from command_line import Fallow
from fallow.cli import doctor
from fallow.config import Config, Harvest, Site
from fallow.core.checks.site import Check, Level
from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, PartitionInfo


def test_a_check_that_breaks_is_a_failed_one() -> None:
    def refuse() -> Check:
        raise FallowError("no")

    def missing() -> Check:
        raise FileNotFoundError(2, "No such file", "/x")

    assert doctor.guarded("a", refuse) == Check("a", Level.FAIL, "no")
    assert doctor.guarded("b", missing) == Check("b", Level.FAIL, "No such file: /x")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing on PATH, not even Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_on_a_bare_machine(monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    monkeypatch.setattr(doctor, "load_config", lambda: Config(cut=("max_nodes = 64 is cut to 16",)))
    monkeypatch.setattr("os.getuid", lambda: 0)
    result = fallow("doctor", "--json")
    assert (result.code, result.json["level"]) == (Exit.UNAVAILABLE, "FAIL")
    levels = {check["name"]: check["level"] for check in result.json["checks"]}
    assert [levels[name] for name in ("slurm commands", "head", "user")] == ["FAIL", "WARN", "WARN"]
    text = fallow("doctor").out
    assert "FAIL  slurm commands: not on PATH" in text
    assert "WARN  configuration: max_nodes = 64 is cut to 16" in text


class Slurm:
    """A client of a cluster with two partitions, one of which preempts the other."""

    backend = "command line"

    async def config(self) -> ClusterConfig:
        return ClusterConfig(cluster="c", slurm_version="22.05.8", preempt_type="preempt/partition_prio")

    async def poll(self) -> ClusterState:
        low = PartitionInfo(partition="low", nodes=["n1"], preempt_mode="REQUEUE", grace_s=30)
        high = PartitionInfo(partition="high", nodes=["n1"], priority_tier=2)
        return ClusterState(at=0.0, nodes=[], jobs=[], partitions=[low, high])


def test_slurm_is_judged_by_one_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COMMANDS", ())
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("fallow.slurm.pyslurm_client.slurm_client", lambda setting: Slurm())
    levels = {check.name: check.level for check in doctor.examine()}
    assert {name: levels[name] for name in ("slurm version", "harvest low")} == {
        "slurm version": Level.OK,
        "harvest low": Level.OK,
    }
    assert {"slurm client", "priority", "clock"} <= set(levels)
    assert "user" not in levels, "of root's alone is said"


@pytest.mark.parametrize("site_allows", [True, False])
def test_hidden_jobs_forbid_harvesting_unless_the_site_allows_it(
    monkeypatch: pytest.MonkeyPatch, site_allows: bool
) -> None:
    class Secretive(Slurm):
        async def config(self) -> ClusterConfig:
            return replace(await super().config(), private_data=["jobs"])

    settings = Config(
        harvest=Harvest(partitions=["high"], allow_without_preemption=True), site=Site(harvest_unseen=site_allows)
    )
    monkeypatch.setattr(doctor, "COMMANDS", ())
    monkeypatch.setattr(doctor, "load_config", lambda: settings)
    monkeypatch.setattr("fallow.slurm.pyslurm_client.slurm_client", lambda setting: Secretive())
    (check,) = (check for check in doctor.examine() if check.name == "harvest high")
    assert ("others' jobs cannot be seen" in check.text) is not site_allows


def test_a_broken_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "config" / "fallow").mkdir(parents=True)
    (tmp_path / "config" / "fallow" / "config.toml").write_text("[harvst]\n")
    checks = {check.name: check for check in doctor.examine()}
    assert checks["configuration"].level is Level.FAIL
    assert "did you mean harvest?" in checks["configuration"].text
