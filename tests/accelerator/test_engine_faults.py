"""The engine's rules for devices, broken one at a time: the fake accelerator must find each of them.

A rule that can be broken unseen is not tested by what passes here. Where none is broken, nothing may be found.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

import accelerator
from accelerator import collectives, nccl
from accelerator.crew import Member, on_both
from fallow.model import FallowError
from fallow.worker.reduction import buckets
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport import communicators, waits
from fallow.worker.transport import device as devices
from fallow.worker.transport import group as group_module
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted
from gpu.test_communicator import grouped, ones
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


def nothing(patch: Patch) -> None:
    """All rules hold."""


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


def host_tensors_are_summed(patch: Patch) -> None:
    def on_host(plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(self: Group, tensor: torch.Tensor, *rest: Any) -> Any:
            return plain(self, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), *rest)

        return launch

    for name in ("sum", "exchange"):
        patch.setattr(Group, name, on_host(getattr(Group, name)))


def control_is_on_the_default_device(patch: Patch) -> None:
    """As where a script has set one, and what is told does not name the host."""

    def empty(*size: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return torch.empty(*size, device="fake" if device == "cpu" else device, **how)

    patch.setattr(waits, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))


def memory_is_used_again_at_once(patch: Patch) -> None:
    def hasty(plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(self: Group, tensor: torch.Tensor, *rest: Any) -> Any:
            plain(self, tensor, *rest)
            tensor.zero_()

        return launch

    for name in ("sum", "exchange"):
        patch.setattr(Group, name, hasty(getattr(Group, name)))


def one_member_launches_in_another_order(patch: Patch) -> None:
    launch, held = Group._launch, list[Any]()

    def swapped(self: Group, *what: Any) -> None:
        if self.rank == 1 and not held:
            held.append(what)
            return
        launch(self, *what)
        while held:
            launch(self, *held.pop())

    patch.setattr(Group, "_launch", swapped)


def no_side_stream_waits(patch: Patch) -> None:
    @contextmanager
    def side_stream(device: torch.device, behind: Any) -> Iterator[None]:
        with torch.Stream(device=device):
            yield

    patch.setattr(devices, "side_stream", side_stream)


FINDS = {
    no_stream_waits_for_sums: "race: ",
    sums_leave_on_a_stream_of_their_own: "race: ",
    copies_of_pageable_memory: "called a synchronizing operation: ",
    the_host_reads_at_once: " reads garbage of ",
    host_tensors_are_summed: "the transport is for fake:0, not for a tensor on cpu",
    control_is_on_the_default_device: "must be on the same type of device",
    memory_is_used_again_at_once: "race: ",
    one_member_launches_in_another_order: "ranks launched unlike collectives: ",
    no_side_stream_waits: "race: ",
}
"""What one of the two says where the rule is broken: another error, of the test itself say, proves nothing."""

SUMMING = [
    (kind, rule)
    for kind in (Arithmetic, Exact)
    for rule in (
        no_stream_waits_for_sums,
        sums_leave_on_a_stream_of_their_own,
        copies_of_pageable_memory,
        host_tensors_are_summed,
        control_is_on_the_default_device,
        memory_is_used_again_at_once,
        one_member_launches_in_another_order,
        nothing,
    )
    if (kind, rule) != (Exact, one_member_launches_in_another_order)  # exchanges of unlike parts are not compared
]


@contextmanager
def broken(
    rule: Callable[[Patch], None], member: Member, group: Group, ranks: Sequence[int] = (0, 1)
) -> Iterator[None]:
    """Inside, the rule does not hold on these ranks. One of the two has to find that, and then neither goes on.

    Raises:
        AssertionError: nobody found it (see `FINDS`), or the rule is `nothing` and somebody found something.
    """
    found: list[object] = []
    transport = group.connections.transport
    with Patch.context() as patch, interrupted_with_the_other(member, group):
        if member.rank in ranks:
            rule(patch)
        try:
            yield
        except Exception as error:
            found.append(error)
            member.store.set(OVER, "")
            group.interrupt("the test is over")
    if isinstance(transport, collectives.Communicator) and transport.get_error() != ErrorType.SUCCESS:
        found.append(transport._reason)
    found += accelerator.reset()
    member.store.set(f"found-{member.rank}", "".join(map(repr, found)))
    told = [member.store.get(f"found-{rank}").decode() for rank in range(member.size)]
    if rule is nothing:
        assert not any(told), told
    else:
        assert any(FINDS[rule] in text for text in told), told


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
        accelerator.report_syncs(True)
        found = [script.step(step) for step in range(STEPS)]
        accelerator.report_syncs(False)
        torch.accelerator.synchronize()
        for got, one_step in zip(found, wanted, strict=True):
            for tensor, other in zip(got, one_step, strict=True):
                torch.testing.assert_close(tensor.double(), other, rtol=2e-5, atol=1e-6)


@on_both
@pytest.mark.parametrize("rule", [no_side_stream_waits, nothing], ids=lambda one: one.__name__)
def test_a_newcomers_state_does_not_wait_for_its_rehearsal(member: Member, rule: Callable[[Patch], None]) -> None:
    with suppress(Interrupted), connected(member) as group:
        script = Newcomer(seed=member.rank)
        with broken(rule, member, group, ranks=[1]):
            script.train(2)
            hand_over(group, script, donors=[0])
            script.backward()
            if script.state_status.settle():
                script.step()
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


# -- what ends a group whose transport is a device communicator: errors that only a fake one makes at will -------------


@on_both
def test_a_communicator_that_fails_alone_breaks_the_group(member: Member) -> None:
    """Its events complete, and there is garbage before them. What is launched later is refused."""
    with grouped(member) as group:
        if member.rank == 0:
            group.sum(ones())
            collectives.communicators()[-1].fail("a link went down")
            with pytest.raises(Interrupted, match="the communicator of fake:0 failed: COMM_ERROR"):
                group.wait_and_verify()
            assert group.broken == "the communicator of fake:0 failed: COMM_ERROR"
            with pytest.raises(Interrupted, match="failed"):
                group.sum(ones())
            group.retire()


@on_both
def test_a_device_that_does_not_end_what_was_aborted_ends_this_member(member: Member) -> None:
    with grouped(member) as group:
        if member.rank == 0:
            stubborn = collectives.communicators()[-1]
            stubborn.ignores_abort = True
            group.sum(ones())
            group.interrupt("over")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group_module, "_DRAIN_S", 0.1)
                with pytest.raises(FallowError, match="fake:0 did not end the aborted collectives of generation 1"):
                    group.retire()
            stubborn.ignores_abort = False
            stubborn.abort()
        member.meet("end")


@on_both
def test_a_registered_backend_is_taken_where_torch_has_no_class_for_the_device(member: Member) -> None:
    device = torch.device("fake:0")
    with nccl.hidden():
        made = communicators.connect(device, None, member.store, member.rank, member.size, 60.0)
    assert type(made) is collectives.Communicator
    assert communicators.choice(device).startswith("nccl")
    member.meet("end")
    made.abort()
