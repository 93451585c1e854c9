"""One poll from what was read at several moments."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import builders
from command_line import write_command
from fallow.core.holes import find_holes
from fallow.model import JobInfo, NodeInfo, PartitionInfo
from fallow.slurm.cli import CliClient
from fallow.slurm.state import cluster_state, user_name


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
    """Also while squeue cannot ask the user data base, and shows numbers."""
    names = {"1": (me, "fallow-r-h1-0a1b2c"), "2": (me, "mine"), "3": ("bob", "fallow-r-h1-0a1b2c")}
    jobs = [builders.job(job_id, "CANCELLED", user=user, name=name) for job_id, (user, name) in names.items()]
    jobs.append(builders.job("4", "COMPLETED", user=me, name="train", comment="x fallow-r-b0-0a1b2c"))
    assert [job.job_id for job in cluster_state([], [], [], jobs, at=1e6).jobs] == ["1", "4"]


def test_a_user_data_base_that_was_away_is_asked_again_with_each_poll_once_a_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that starts before the site's name service has to know its own jobs by name later on."""
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
    """With FederationParameters=fed_display the commands show all of them else."""
    for name in ("squeue", "scontrol"):
        write_command(tmp_path, name, FEDERATED)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    client = CliClient()
    assert [node.node for node in (await client.poll()).nodes] == ["n1"]
    await client.own_jobs()
    assert [name for name in os.listdir(tmp_path) if name.startswith("asked")] == ["asked.local"]
