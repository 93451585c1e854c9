"""Nodes whose workers have collectives of their own, as the parts of a sharded model have: they go the same way."""

import ctypes
import os
import signal
import socket

import psutil
import pytest
from elastic_rig import Elastic, MakeRig, Rig, member, send

from fallow.model import RunView
from lacking import lacks
from waiting import gone, until

LEASE_S = 8.0
"""Longer than a process stands still, or takes to end, on a busy machine."""

_PIDFD_GETFD = 438
"""System call number, the same on all architectures: see pidfd_getfd(2)."""


async def on_nodes(rig: Rig, nodes: int, *options: object) -> Elastic:
    """A run on so many nodes with two workers each."""
    wanted = "--siblings", "--global-batch", 48, "--steps", 60, *options
    run = await rig.run(*wanted, members=nodes, most=nodes, scripted=False, workers_per_node=2)
    await run.arrive(nodes, workers=2)
    await run.becomes([f"n{i}" for i in range(nodes)])
    return run


async def test_s27_workers_of_other_nodes_crash_at_any_place_of_a_step(make_rig: MakeRig) -> None:
    """In the first body, when a bucket is on its way, when the part is told, and when all are heard."""
    places = {"": "n4.1", "launch": "n3.0", "told": "n2.1", "heard": "n1.0"}
    left = [f"n{i}" for i in range(5)]
    # A node that has crashed does not come back.
    async with make_rig(membership__lease_s=LEASE_S, membership__bar_after=1) as rig:
        run, step = await on_nodes(rig, 5), -1
        for place, worker in places.items():
            node = worker.partition(".")[0]
            # Two crashes at what the head takes for the same step would be the script's fault.
            await run.until(lambda view, node=node, step=step: step_of(view, node) > step, f"{node} makes no step")
            async with run.paused() as step:
                run.plan("crash", worker, f"{place}{step}")
            left.remove(node)
            await run.becomes(left)
        report = await run.judged(losses=4)
        texts = [event.text for event in await run.events("eject")]
    # Not what it does to the other worker, whose next exchange fails.
    reasons = [f"worker {worker} was killed by signal 11" for worker in places.values()]
    assert [text.partition(" is gone: ")[2] for text in texts if not text.startswith("generation")] == reasons
    assert [len(one.members) for one in report.generations] == [5, 4, 3, 2, 1]


def step_of(view: RunView, node: str) -> int:
    """The newest step of this node that the head knows of."""
    found = member(view, node)
    return -1 if found is None else found.step


@pytest.mark.parametrize("options", [(), ("--rich",)], ids=["plain", "rich"])
async def test_s27_one_worker_loses_its_group_and_its_sibling_goes_no_further_alone(
    options: tuple[object, ...], make_rig: MakeRig
) -> None:
    """At any place of a step, each of the two; nobody is to blame, so all stay."""
    places = [("", 0), ("launch", 1), ("told", 0), ("opt", 1), ("", 1), ("launch", 0), ("told", 1), ("opt", 0)]
    places = places[:4] if options else places
    async with make_rig() as rig:
        run = await on_nodes(rig, 2, *options)
        for number, (place, slot) in enumerate(places):
            async with run.paused() as step:
                gate = run.plan("lose", f"n{number % 2}.{slot}", f"{place}{step}")
            await until(lambda gate=gate: not gate.exists(), f"{gate.name}: not there")
            await run.reaches(step + 1)
        report = await run.judged(losses=len(places))
    assert {tuple(one.members) for one in report.generations} == {("n0", "n1")}


async def test_s27_one_connection_between_two_nodes_breaks(make_rig: MakeRig) -> None:
    """One worker of each node loses its group. Their siblings wait for sums that never come, until they hear of it."""
    async with make_rig() as rig:
        run = await on_nodes(rig, 2)
        view = await run.view()
        one, other = member(view, "n0"), member(view, "n1")
        assert one is not None
        assert other is not None
        for slots in ((0, 1), (1, 1)):
            async with run.paused() as step:
                sever(one.pids[slots[0]], other.pids[slots[1]])
            await run.reaches(step + 1)
        report = await run.judged(losses=2)
    assert {tuple(one.members) for one in report.generations} == {("n0", "n1")}
    assert len(report.generations) == 3


def sever(one: int, other: int) -> None:
    """Break all TCP connections between two processes."""
    ends = {(found.raddr, found.laddr) for found in psutil.Process(other).net_connections("tcp")}
    shared = [found.fd for found in psutil.Process(one).net_connections("tcp") if (found.laddr, found.raddr) in ends]
    assert shared
    process = os.pidfd_open(one)
    # All before the first one breaks: then the process closes the others.
    copies = [ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0) for number in shared]
    if max(copies) < 0:
        lacks(f"no access to the connections of another process: {os.strerror(ctypes.get_errno())}")
    for copied in filter(lambda copied: copied >= 0, copies):
        with socket.socket(fileno=copied) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    os.close(process)


async def test_s27_a_worker_that_is_stopped_costs_its_node_alone(make_rig: MakeRig) -> None:
    """Its sibling waits for it in front of the next body, and ends with it. Another node takes the place."""
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await on_nodes(rig, 2)
        lost = member(await run.view(), "n0")
        assert lost is not None
        async with run.paused() as step:
            run.plan("stop", "n0.1", step)
        await run.becomes(["n1", "n2"])  # its agent has started two others, which rehearse together
        send(lost.pids[1], signal.SIGCONT)
        await until(lambda: all(map(gone, lost.pids)), "a worker of the node is left")
        await run.judged(losses=1)
