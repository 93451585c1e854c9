"""The engine's rules for devices, broken one at a time: the fake accelerator must find each of them.

A rule that can be broken unseen is not tested by what passes here.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

import accelerator
from accelerator.crew import Member, on_both
from fallow.worker.reduction import buckets
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport import device as devices
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted
from gpu.test_handover import Script as Newcomer
from gpu.test_handover import connected, hand_over
from gpu.test_reduction import STEPS, Script, expected, group_of

Patch = pytest.MonkeyPatch
OVER = "over"


def everywhere(patch: Patch, name: str, value: Any) -> None:
    """In each module of the engine that has this function of `devices`."""
    old = getattr(devices, name)
    for module in [found for key, found in sys.modules.items() if key.startswith("fallow.worker")]:
        if getattr(module, name, None) is old:
            patch.setattr(module, name, value)


def no_stream_waits_for_sums(patch: Patch) -> None:
    patch.setattr(Group, "stream_waits", lambda self: self._launched.clear())


def sums_leave_on_a_stream_of_their_own(patch: Patch) -> None:
    def aside(plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            with torch.Stream(device="fake"):
                return plain(*args)

        return launch

    for name in ("sum", "exchange"):
        patch.setattr(Group, name, aside(getattr(Group, name)))


def copies_of_pageable_memory(patch: Patch) -> None:
    everywhere(patch, "to_host", lambda tensor: tensor.detach().cpu())


def the_host_reads_at_once(patch: Patch) -> None:
    patch.setattr(devices, "wait", lambda event, stop=None: None)


SUMMING = [
    (kind, rule)
    for kind, rule in itertools.product(
        (Arithmetic, Exact),
        (
            no_stream_waits_for_sums,
            sums_leave_on_a_stream_of_their_own,
            copies_of_pageable_memory,
            the_host_reads_at_once,
        ),
    )
    if (kind, rule) != (Arithmetic, the_host_reads_at_once)  # nothing is read, but for aborts: below
]


@contextmanager
def broken(rule: Callable[[Patch], None], member: Member, group: Group) -> Iterator[None]:
    """Inside, the rule does not hold. One of the two processes has to find that, and then neither goes on.

    Raises:
        AssertionError: nobody found it.
    """
    found: list[object] = []
    with Patch.context() as patch, interrupted_with_the_other(member, group):
        rule(patch)
        try:
            yield
        except Exception as error:
            if not isinstance(error, Interrupted):
                found.append(error)
            member.store.set(OVER, "")
            group.interrupt("the test is over")
    found += accelerator.reset()
    member.store.set(f"found-{member.rank}", "".join(map(repr, found)))
    assert any(member.store.get(f"found-{rank}") for rank in range(member.size)), "nobody has noticed"


@contextmanager
def interrupted_with_the_other(member: Member, group: Group) -> Iterator[None]:
    """As a head would do it when a member ends."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            if member.store.check([OVER]):
                group.interrupt("the other process has found something")
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    done.set()
    watcher.join()


@on_both
@pytest.mark.parametrize(("kind", "rule"), SUMMING, ids=lambda one: one.__name__)
def test_a_rule_of_the_sums(member: Member, kind: type[Arithmetic], rule: Callable[[Patch], None]) -> None:
    buckets._FIRST_BYTES = buckets._LAST_BYTES = 1 << 12
    with group_of(member) as group, broken(rule, member, group):
        script, wanted = Script(group, kind()), expected()
        accelerator.report_syncs("raise")
        found = [script.step(step) for step in range(STEPS)]
        accelerator.report_syncs("off")
        torch.accelerator.synchronize()
        for got, one_step in zip(found, wanted, strict=True):
            for tensor, other in zip(got, one_step, strict=True):
                torch.testing.assert_close(tensor.double(), other, rtol=2e-5, atol=1e-6)


def no_side_stream_waits(patch: Patch) -> None:
    @contextmanager
    def side_stream(device: torch.device, behind: Any) -> Iterator[None]:
        with torch.Stream(device=device):
            yield

    patch.setattr(devices, "side_stream", side_stream)


@on_both
def test_a_newcomers_state_does_not_wait_for_its_rehearsal(member: Member) -> None:
    with suppress(Interrupted), connected(member) as group:
        script = Newcomer(seed=member.rank)
        with broken(no_side_stream_waits if member.rank == 1 else lambda patch: None, member, group):
            script.train(2)
            hand_over(group, script, donors=[0])
            script.train(1)
            script.standing.complete()
            torch.accelerator.synchronize()


@on_both
def test_who_does_not_wait_for_its_sums_uses_those_of_an_abort(member: Member) -> None:
    with group_of(member) as group, broken(the_host_reads_at_once, member, group):
        script, communicator = Script(group, Arithmetic()), group.connections.transport
        with accelerator.held(communicator.stream):
            script.step(0)
            group.interrupt("a member is lost")
            while not communicator._ended():  # it is aborted on a thread of its own
                time.sleep(0.001)
        torch.accelerator.synchronize()
