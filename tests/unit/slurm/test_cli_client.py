"""Slurm's commands: what keeps them from starting, and one poll from what was read at several moments."""

import asyncio
import contextlib
import os
import stat
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders import Clock
from command_line import write_command
from fallow.core.holes import find_holes
from fallow.model import ClusterState, FallowError, JobInfo, JobRequest, NodeInfo, PartitionInfo
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmUnavailable, SubmitRejected
from fallow.slurm.paced import BURST_S, CONFIG_S, STRAINED_S, Bucket, PacedClient
from fallow.slurm.process import run
from fallow.slurm.state import cluster_state, user_name
from scripted_slurm import ScriptedSlurm
from waiting import until

REQUEST = JobRequest(token="fallow-r-h1", options=["--time=5"], script="#!/bin/sh\nexit 0\n", cwd="/")

SBATCH = """#!/bin/sh
for word; do case $word in */fallow-*.sh) script=$word;; esac; done
[ -n "$KEEP" ] && cp -p "$script" "$KEEP" && pwd > "$KEEP.cwd"
rm -f "$script"
echo 7
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder, and a sbatch that accepts every job."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    sbatch = write_command(tmp_path / "bin", "sbatch", SBATCH)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_only_we_can_read_the_script_and_sbatch_is_called_in_the_jobs_folder(
    scripts: Path, tmp_path: Path
) -> None:
    kept, cwd = tmp_path / "kept", tmp_path / '-a "$(id)"'
    cwd.mkdir()
    request = JobRequest(token="t", options=[], script=REQUEST.script, environment={"KEEP": str(kept)}, cwd=str(cwd))
    assert await CliClient().submit(request) == "7"
    assert os.listdir(scripts) == [], "that it was cleaned away meanwhile does not undo the submission"
    assert (kept.read_text(), (tmp_path / "kept.cwd").read_text()) == (REQUEST.script, f"{cwd}\n")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


async def test_a_full_temporary_folder_is_told_and_nothing_is_submitted(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, fdopen = os.open("/dev/full", os.O_WRONLY), os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: fdopen(os.dup2(full, fd), mode))
    with pytest.raises(SlurmUnavailable) as caught:
        await CliClient().submit(REQUEST)
    assert caught.value.message == (
        f"sbatch: cannot write its script to {scripts} (No space left on device); "
        "make room there, or start the head with TMPDIR set to another folder"
    )
    assert os.listdir(scripts) == []


async def test_a_missing_working_folder_is_a_refusal(scripts: Path) -> None:
    with pytest.raises(SubmitRejected, match=r"/nosuch/folder.*No such file"):
        await CliClient().submit(JobRequest(token="t", options=[], script=REQUEST.script, cwd="/nosuch/folder"))
    assert os.listdir(scripts) == []


async def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nosuch")
    with pytest.raises(SlurmUnavailable, match=r"scontrol .*install"):
        await CliClient().config()


async def test_a_folder_of_path_that_hangs_costs_calls_of_slurm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, threads = threading.Event(), list[threading.Thread]()

    def hang(name: str) -> None:
        threads.append(threading.current_thread())
        answers.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr("fallow.slurm.process.shutil.which", hang)
        patch.setattr("fallow.slurm.process.FILES_S", 0.1)
        for _ in range(3):
            with pytest.raises(SlurmUnavailable, match=r"scancel .*a folder of PATH does not answer\); try again"):
                await CliClient().cancel(["7"])
        await until(lambda: threads)
    answers.set()
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                assert (await run(["true"], environment={}, timeout_s=60.0)).code == 0
                return
            await asyncio.sleep(0.01)


# -- one poll ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_state", "node_state"),
    [
        ("RUNNING", "ALLOCATED"),
        ("CONFIGURING", "ALLOCATED"),
        ("SUSPENDED", "ALLOCATED"),  # Slurm says IDLE, CPUAlloc=0, and starts nothing there
        ("STOPPED", "ALLOCATED"),
        ("COMPLETING", "IDLE"),  # of the two nodes that it had it has left this one meanwhile
        ("PENDING", "IDLE"),
    ],
)
def test_a_node_that_a_job_keeps_is_not_idle(job_state: str, node_state: str) -> None:
    node = NodeInfo(node="n1", state="IDLE", cpus=4, memory_mb=4000, memory_used_mb=4000)
    job = JobInfo(job_id="1", name="x", user="bob", state=job_state, partition="p", nodes=["n1"])
    partition = PartitionInfo(partition="p", nodes=["n1"])
    found = cluster_state([node], [partition], [], [job], at=1e6)
    assert [n.state for n in found.nodes] == [node_state]
    assert [hole.node for hole in find_holes(found, found.partitions)] == (["n1"] if node_state == "IDLE" else [])


@pytest.mark.parametrize("me", [user_name(os.getuid()), str(os.getuid())])
def test_of_ended_jobs_only_our_own_with_a_token_are_shown(me: str) -> None:
    """Also if squeue cannot reach the user database, and prints numbers."""
    names = {"1": (me, "fallow-r-h1-0a1b2c"), "2": (me, "mine"), "3": ("bob", "fallow-r-h1-0a1b2c")}
    jobs = [builders.job(job_id, "CANCELLED", user=user, name=name) for job_id, (user, name) in names.items()]
    jobs.append(builders.job("4", "COMPLETED", user=me, name="train", comment="x fallow-r-b0-0a1b2c"))
    assert [job.job_id for job in cluster_state([], [], [], jobs, at=1e6).jobs] == ["1", "4"]


def test_a_user_data_base_that_was_away_is_asked_again_with_each_poll_once_a_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that starts before the site's name service must later recognize its own jobs by name."""
    asked: list[int] = []
    known: dict[int, SimpleNamespace] = {}

    def getpwuid(uid: int) -> SimpleNamespace:
        asked.append(uid)
        return known[uid]

    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    monkeypatch.setattr("os.getuid", lambda: 4242)
    for name in ("4242", "alice"):
        jobs = (builders.job(str(i), "PENDING", user=user_name(4242)) for i in range(3))
        assert {job.user for job in cluster_state([], [], [], jobs, at=1e6).jobs} == {name}
        assert asked == [4242]
        asked.clear()
        known[4242] = SimpleNamespace(pw_name="alice")


FEDERATED = """#!/bin/sh
case " $* " in *" --local "*) ;; *) far=1 ;; esac
[ "${0##*/}" = scontrol ] && echo "NodeName=n1 State=IDLE Partitions=p" && echo "${far:+NodeName=far1 State=IDLE}"
[ "${0##*/}" = squeue ] && touch "$ASKED.${far:-local}"
exit 0
"""


async def test_only_this_cluster_of_a_federation_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, the commands show all clusters if FederationParameters=fed_display is set."""
    for name in ("squeue", "scontrol"):
        write_command(tmp_path, name, FEDERATED)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    client = CliClient()
    assert [node.node for node in (await client.poll()).nodes] == ["n1"]
    await client.own_jobs()
    assert [name for name in os.listdir(tmp_path) if name.startswith("asked")] == ["asked.local"]


# -- how much slurmctld is asked --------------------------------------------------------------------------------------


def paced(clock: Clock, slurm: ScriptedSlurm | None = None) -> tuple[PacedClient, ScriptedSlurm]:
    inner = slurm or ScriptedSlurm(nodes=2)
    client = PacedClient(inner, queries_per_min=60, submits_per_min=30, clock=clock, sleep=clock.sleep)
    return client, inner


@given(st.floats(1, 600), st.lists(st.tuples(st.floats(0, 30), st.sampled_from([1.0, 5.0])), min_size=1, max_size=60))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(
    per_min: float, calls: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(per_min, clock)
    used: list[tuple[float, float]] = []
    for pause, cost in calls:
        clock.now += pause
        used.append((clock.now + bucket.take(cost), cost))
    burst = max(1.0, per_min / 60 * BURST_S)
    for first, (start, _) in enumerate(used):
        for last in range(first, len(used)):
            total = sum(cost for _, cost in used[first : last + 1])
            assert total <= burst + (used[last][0] - start) * per_min / 60 + used[first][1] + 1e-6


async def test_what_is_really_sent_counts() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    slurm.poll_requests = 6
    for _ in range(4):
        await client.poll()
    assert sum(clock.slept) == pytest.approx(4 * 6 - BURST_S), "the first three and a bit are the burst"
    before = len(clock.slept)
    clock.now += 3600.0
    await client.owner()
    await client.cancel([str(number) for number in range(1000)])
    assert len(clock.slept) == before


async def test_the_configuration_is_asked_for_once_an_hour() -> None:
    clock = Clock()
    client, slurm = paced(clock)
    first = await client.config()
    slurm.unavailable = True
    assert await client.config() is first
    clock.now += CONFIG_S
    with pytest.raises(SlurmUnavailable):
        await client.config()


async def test_a_slow_slurmctld_is_asked_less() -> None:
    clock = Clock()

    class Slow(ScriptedSlurm):
        async def poll(self) -> ClusterState:
            await clock.sleep(4.0)
            return await super().poll()

    client, slurm = paced(clock, Slow(nodes=1))
    assert client.least_interval_s == 0.0
    slurm.start_s = 3.0
    await client.poll()
    assert client.least_interval_s == 4.0, "what it takes to start a program is no load"
    client, slurm = paced(clock, Slow(nodes=1))
    await client.poll()
    assert client.least_interval_s == 16.0
    slurm.unavailable = True
    for _ in range(6):
        clock.now += 30.0
        with pytest.raises(SlurmUnavailable):
            await client.poll()
    assert client.least_interval_s == 16.0, "an outage is no load"


async def test_one_that_limits_our_rate_is_asked_half_as_often() -> None:
    class Limiting(ScriptedSlurm):
        async def test_only(self, request: JobRequest) -> str:
            raise SlurmUnavailable("squeue: Rate limit exceeded, please retry momentarily")

    clock = Clock()
    client, _ = paced(clock, Limiting(nodes=1))
    with pytest.raises(FallowError, match="Rate limit"):
        await client.test_only(JobRequest(token="fallow-x", options=[], script=""))
    await client.poll()
    await client.poll()
    assert clock.slept == [2.0, 2.0], "nothing saved up, and half the rate"
    clock.now += STRAINED_S
    await asyncio.gather(*(client.poll() for _ in range(20)))
    assert len(clock.slept) == 2
