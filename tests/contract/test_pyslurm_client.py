"""Polls through pyslurm, with a stub in pyslurm's place: what is left to the commands, and when."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import write_command
from fallow.clock import steady
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmUnavailable
from fallow.slurm.process import run
from fallow.slurm.pyslurm_client import PyslurmClient, slurm_client
from waiting import gone, until

STUB = Path(__file__).parents[1] / "data" / "pyslurm_stub"
COMMANDS = {
    "scontrol": """case "$*" in
*config*) echo "ClusterName = c"; echo "SLURM_VERSION = $(cat "$WORLD/slurm")" ;;
*) echo "NodeName=from-scontrol State=IDLE CPUTot=8" ;;
esac""",
    "squeue": "exit 0",
}


@pytest.fixture
def behave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says how the stub behaves from the next process on; Slurm's commands are made up, too."""
    for name, body in COMMANDS.items():
        write_command(tmp_path / "bin", name, body)
    (tmp_path / "slurm").write_text("25.11.7")
    monkeypatch.setenv("WORLD", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)
    monkeypatch.setenv("PYSLURM_STUB", str(tmp_path / "stub.json"))
    # Python may take long to start beside other work.
    monkeypatch.setattr("fallow.slurm.pyslurm_client.BEGIN_S", 60.0)

    def say(**how: object) -> None:
        (tmp_path / "stub.json").write_text(json.dumps(how))

    say()
    return say


@pytest.fixture
def client(behave: Callable[..., None]) -> PyslurmClient:
    return PyslurmClient()


async def nodes(client: PyslurmClient) -> list[str]:
    return [node.node for node in (await client.poll()).nodes]


async def test_pyslurm_answers_polls_where_it_matches(client: PyslurmClient) -> None:
    began = steady()
    state = await client.poll()
    [node] = state.nodes
    assert (node.node, node.gpus, node.gpu_types, node.partitions) == ("from-pyslurm", 4, {"a100": 4}, ["gpu"])
    assert state.reservations == [], "hidden ones are none"
    assert began <= state.at <= steady()
    assert client.backend == "pyslurm 25.11.2"
    assert 0.0 < client.start_s < steady() - began


@pytest.mark.parametrize(
    ("how", "slurm", "reason"),
    [
        ({}, "24.11.5", "pyslurm 25.11.2 fits only its own version of Slurm, and the cluster runs Slurm 24.11"),
        ({"version": "24.11.0"}, "24.11.5", "pyslurm 24.11.0 is older than 25.11"),
        ({"exit": 1}, "25.11.7", "fatal: Could not establish a configuration source; next try in 5 s"),
        ({"crash": 1}, "25.11.7", "(killed by SIGSEGV); next try in 5 s"),
    ],
)
async def test_the_commands_answer_where_pyslurm_cannot_be_had(
    behave: Callable[..., None], tmp_path: Path, how: dict[str, object], slurm: str, reason: str
) -> None:
    (tmp_path / "slurm").write_text(slurm)
    behave(**how)
    client = PyslurmClient()
    assert await nodes(client) == ["from-scontrol"]
    assert client.backend.startswith("command line (") and reason in client.backend
    insisting = PyslurmClient(insist=True)
    with pytest.raises(SlurmUnavailable, match=r'client = "auto"'):
        await nodes(insisting)


async def test_a_program_of_another_version_of_fallow_is_not_understood(
    client: PyslurmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that runs on while Fallow is upgraded starts programs of the new version."""
    monkeypatch.setattr("fallow.slurm.pyslurm_client.__version__", "0.0.1")
    assert await nodes(client) == ["from-scontrol"]
    assert "Fallow" in client.backend and "0.0.1" in client.backend


@pytest.mark.parametrize(("retry_s", "answers"), [(1000.0, "scontrol"), (0.0, "pyslurm")])
async def test_after_a_crash_the_commands_answer_for_a_while(
    client: PyslurmClient, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch, retry_s: float, answers: str
) -> None:
    monkeypatch.setattr("fallow.slurm.pyslurm_client.RETRY_S", retry_s)
    behave(crash=1)
    await nodes(client)
    behave()
    assert await nodes(client) == [f"from-{answers}"]


async def test_a_new_version_of_the_cluster_is_noticed(client: PyslurmClient, tmp_path: Path) -> None:
    for version, answers in (("24.11.5", "scontrol"), ("25.11.0", "pyslurm")):
        (tmp_path / "slurm").write_text(version)
        assert (await client.config()).slurm_version == version
        assert await nodes(client) == [f"from-{answers}"]


async def test_a_slurmctld_that_is_away_is_no_failure_of_pyslurm(
    client: PyslurmClient, behave: Callable[..., None]
) -> None:
    behave(error=1)
    with pytest.raises(SlurmUnavailable, match="Unable to contact slurm controller"):
        await nodes(client)
    behave()
    assert await nodes(client) == ["from-pyslurm"], "at once"


def test_the_setting_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = slurm_client("cli")
    assert isinstance(forced, CliClient) and forced.backend == "command line (as configured)"
    assert isinstance(slurm_client("pyslurm"), PyslurmClient)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert slurm_client("auto").backend == "command line (pyslurm is not installed)"
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(STUB))
    assert isinstance(slurm_client("auto"), PyslurmClient)


async def test_a_hanging_pyslurm_is_told_of_at_the_deadline(behave: Callable[..., None]) -> None:
    behave(hang=1)
    client = PyslurmClient(query_timeout_s=2.0)
    with pytest.raises(SlurmUnavailable, match="no answer within 2 s"):
        await nodes(client)
    assert await nodes(client) == ["from-scontrol"], "the commands are asked for a while"


async def test_the_commands_answer_the_poll_of_a_pyslurm_that_does_not_begin(
    client: PyslurmClient, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fallow.slurm.pyslurm_client.BEGIN_S", 0.1)
    behave(stuck=1)
    assert await nodes(client) == ["from-scontrol"]
    assert "did not begin within 0.1 s; next try in 5 s" in client.backend
    assert client.start_s >= 0.1, "slurmctld was not asked in this time"
    insisting = PyslurmClient(insist=True, query_timeout_s=2.0)
    with pytest.raises(SlurmUnavailable, match="no answer within 2 s"):
        await nodes(insisting)


async def test_a_command_whose_call_is_broken_off_is_killed_with_its_children(tmp_path: Path) -> None:
    squeue = write_command(tmp_path, "squeue", f"sleep 1000 & echo $! > {tmp_path}/pid; wait")

    def sleepers() -> list[int]:
        return [int(pid.read_text()) for pid in tmp_path.glob("pid") if pid.read_text().endswith("\n")]

    call = asyncio.create_task(run([str(squeue)], environment=os.environ, timeout_s=1000.0))
    (sleeper,) = await until(sleepers)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: gone(sleeper))
