"""Runs tests in processes that have loaded a device, which pytest's own process must not."""

import faulthandler
import functools
import importlib
import inspect
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from gpu.device import Device, require

SIZE = 2
LIMIT_S = 300.0
"""A function that takes longer is hung."""

GRACE_S = 10.0
"""The same, once another process has found something wrong: it may be waited for."""


@dataclass(frozen=True)
class Member:
    """One process of the crew as the functions see it. `store` is a fresh one for each call."""

    rank: int
    size: int
    store: Any

    def meet(self, name: str) -> None:
        """Until all are here."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])


class Crew:
    """Processes with a device each, or with one that all use; started once and used for many tests."""

    def __init__(self, device: Device, size: int = SIZE) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls = itertools.count()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            pipe, other = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(device, rank, size, other), daemon=True))
            self._processes[-1].start()
            self._pipes.append(pipe)
            other.close()
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, module: str, name: str, ranks: int, parameters: dict[str, Any]) -> list[Any]:
        """Call a test's body on the first `ranks` processes. Returns its values.

        Raises:
            AssertionError: with the traceback, if it raised on any of them, left reports, or hung.
        """
        call = next(self._calls)
        for pipe in self._pipes[:ranks]:
            pipe.send((call, module, name, ranks, parameters))
        values, problems = [None] * ranks, [""] * ranks
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        until = time.monotonic() + LIMIT_S
        while pending:
            answered = wait(list(pending), max(0.0, until - time.monotonic()))
            for pipe, rank in list(pending.items()):
                if answered and pipe not in answered:
                    continue
                del pending[pipe]
                try:
                    if not answered:
                        raise EOFError("hung")
                    values[rank], problems[rank] = pipe.recv()
                except (EOFError, ConnectionError) as error:
                    problems[rank] = f"the process ended or hung: {error!r}"
                    self.kill()
                if problems[rank]:
                    until = min(until, time.monotonic() + GRACE_S)
        found = [f"--- rank {rank}\n{problem}" for rank, problem in enumerate(problems) if problem]
        assert not found, "\n" + "\n".join(found)
        return values

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def stop(self) -> list[int | None]:
        """End the processes in order. Returns their exit codes."""
        for pipe in self._pipes if self.alive else ():
            pipe.send(None)
        for process in self._processes:
            process.join(120.0)
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a test of a body. The body runs in another process and takes fixtures' values; pass it no others."""


def decorators(device: Device) -> tuple[Decorator, Decorator, Decorator]:
    """Decorators for tests on a device.

    Returns:
        One for a body that runs in one process; one for a body that runs in two processes at a time, with a `Member`
        as first argument; and the same for two processes that need a device each, since they sum on it.
    """
    return (
        functools.partial(_remote, device=device, ranks=1),
        functools.partial(_remote, device=device, ranks=SIZE),
        functools.partial(_remote, device=device, ranks=SIZE, devices=SIZE),
    )


_crews: dict[str, Crew] = {}
"""Those in use, by the kind of their device: folders share them."""


@pytest.fixture(scope="session")
def crews() -> Iterator[dict[str, Crew]]:
    """The crews in use, by the kind of their device."""
    yield _crews
    assert all(crew.stop() == [0, 0] for crew in _crews.values() if crew.alive)


def _remote(body: Callable[..., Any], *, device: Device, ranks: int, devices: int = 1) -> Callable[..., Any]:
    @functools.wraps(body)
    def test(crews: dict[str, Crew], **parameters: Any) -> None:
        require(device)
        if device.count() < devices:
            pytest.skip(f"needs {devices} GPUs, this machine has {device.count()}: NCCL refuses two ranks on one")
        if device.kind not in crews or not crews[device.kind].alive:
            crews[device.kind] = Crew(device)
        crews[device.kind].run(body.__module__, body.__name__, ranks, parameters)

    own = [*inspect.signature(body).parameters.values()][ranks - 1 :]
    fixture = inspect.Parameter("crews", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([fixture, *own])  # type: ignore[attr-defined]
    return pytest.mark.timeout(600)(test)  # the first one may compile the device


def _serve(device: Device, rank: int, size: int, pipe: Connection) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # else a loader may start no processes
    torch.set_num_threads(1)
    device.load(rank)
    (torch.ones(1, device=device.kind) + 1).item()  # torch loads what it needs for the first operator
    if rank == 0:  # its port is found as it listens, so that nobody else takes it
        store = torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = torch.distributed.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False)
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        call, module, name, ranks, parameters = request
        body = inspect.unwrap(getattr(importlib.import_module(module), name))
        member = Member(rank, size, torch.distributed.PrefixStore(str(call), store))
        value, problem = None, ""
        faulthandler.dump_traceback_later(LIMIT_S - 10.0)
        try:
            value = body(*[member][: ranks - 1], **parameters)
        except BaseException:
            problem = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        try:
            reports = device.reset()
        except Exception:
            reports = [traceback.format_exc()]
        if reports and not problem:
            problem = f"reports were left: {reports}"
        pipe.send((value, problem))
    device.end()
    os._exit(0)  # at once: threads are still taking gloo's groups down, which must not outlive what they use
