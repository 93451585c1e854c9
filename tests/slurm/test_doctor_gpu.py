"""`fallow doctor --gpu` in a real allocation, on processors: the nodes meet, and all-reduces go between them."""

import os
import subprocess

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from fallow.cli.doctor import doctor
from fallow.model import FallowError
from fallow.nodecheck import launch
from fallow.testbed.cluster import Testbed

pytestmark = pytest.mark.slurm


def test_the_nodes_of_an_allocation_are_looked_at(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(FallowError, match="salloc"):
        launch.examine()
    slurm_testbed = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--gres=gpu:2"],
        env={"PATH": os.environ["PATH"], **testbed.env()},
        capture_output=True,
        text=True,
        check=True,
    )
    job = slurm_testbed.stderr.split("Granted job allocation ")[1].split()[0]
    for name, value in {**testbed.env(), "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "MEASURED_S", 0.5)
    result = CliRunner().invoke(doctor, ["--gpu", "--json"], standalone_mode=False)
    results = {check["name"]: check for check in msgspec.json.decode(result.stdout)["checks"]}
    assert (result.return_value, results["GPUs"]["level"], results["GPUs"]["found"]) == (69, "FAIL", "torch sees none")
    assert results["gradients"]["found"].startswith("gloo")
    assert "GB/s" in results["all-reduce"]["found"]
    assert "2 nodes" in results["all-reduce"]["found"]
