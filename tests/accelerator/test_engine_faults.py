"""The engine's rules for devices, broken one at a time: the fake accelerator must find each of them.

A rule that can be broken unseen is not tested by what passes here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import accelerator
from accelerator.collectives import communicators
from accelerator.crew import Member, on_both
from accelerator.test_handover import Script as Newcomer
from accelerator.test_handover import connected, hand_over
from accelerator.test_reduction import STEPS, Script, expected, group_of
from fallow.worker.reduction import buckets
from fallow.worker.reduction.arithmetic import Floating
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport import communicators as transports
from fallow.worker.transport import device as devices
from fallow.worker.transport.group import Group

Patch = pytest.MonkeyPatch


def everywhere(patch: Patch, name: str, value: Any) -> None:
    """In each module of the engine that has this function of `devices`."""
    old = getattr(devices, name)
    for module in [found for key, found in sys.modules.items() if key.startswith("fallow.worker")]:
        if getattr(module, name, None) is old:
            patch.setattr(module, name, value)


def no_stream_waits_for_sums(patch: Patch) -> None:
    patch.setattr(Group, "behind", lambda self: self._launched.clear())


def sums_leave_on_a_stream_of_their_own(patch: Patch) -> None:
    def aside(plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            with torch.Stream(device="fake"):
                return plain(*args)

        return launch

    for name in ("sum", "exchange"):
        patch.setattr(transports.Communicator, name, aside(getattr(transports.Communicator, name)))


def copies_of_pageable_memory(patch: Patch) -> None:
    everywhere(patch, "to_host", lambda tensor: tensor.detach().cpu())


def the_host_reads_at_once(patch: Patch) -> None:
    patch.setattr(devices, "wait", lambda event, stop=None: None)


SUMMING = [
    no_stream_waits_for_sums,
    sums_leave_on_a_stream_of_their_own,
    copies_of_pageable_memory,
    the_host_reads_at_once,
]


@contextmanager
def broken(rule: Callable[[Patch], None]) -> Iterator[None]:
    """Inside, the rule does not hold; that has to be found.

    Raises:
        AssertionError: it was not.
    """
    found: list[object] = []
    with Patch.context() as patch:
        rule(patch)
        try:
            yield
        except Exception as error:
            found.append(error)
    found += accelerator.reset()
    assert found, "nobody has noticed"


@on_both
@pytest.mark.parametrize("rule", SUMMING, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("kind", [Floating, Exact])
def test_a_rule_of_the_sums(member: Member, rule: Callable[[Patch], None], kind: type[Floating | Exact]) -> None:
    buckets._FIRST_BYTES = buckets._LAST_BYTES = 1 << 12
    with group_of(member) as group, broken(rule):
        for one in communicators():
            one.delay_s = 0.01
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
    def beside(device: torch.device, behind: Any = None) -> Iterator[None]:
        with torch.Stream(device=device):
            yield

    patch.setattr(devices, "beside", beside)


def nobody_follows_a_side_stream(patch: Patch) -> None:
    patch.setattr(devices, "follow", lambda event, device: None)


@on_both
@pytest.mark.parametrize("rule", [no_side_stream_waits, nobody_follows_a_side_stream], ids=lambda rule: rule.__name__)
def test_a_rule_of_the_hand_over(member: Member, rule: Callable[[Patch], None]) -> None:
    with connected(member) as group:
        script = Newcomer(seed=member.rank)
        with broken(rule) if member.rank == 1 else broken_elsewhere():
            script.train(2)
            hand_over(group, script, donors=[0])
            script.train(1)
            script.standing.complete()
            torch.accelerator.synchronize()


@contextmanager
def broken_elsewhere() -> Iterator[None]:
    """What the other process finds ends what this one does with it."""
    try:
        yield
    except Exception:
        accelerator.reset()
