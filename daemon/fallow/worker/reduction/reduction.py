"""Sums the gradients of a step over its shards and over the members, while backward goes on.

A hook of each parameter takes the gradient out of `.grad`. Small gradients wait until several can be added together.
Then weight x gradient is added to the parameter's place in a flat bucket. In a member's last body, a bucket leaves for
its sum over the members as soon as it has all expected gradients. All members launch their buckets in one fixed order.

The expected number of gradients is a guess from earlier bodies. If the guess is too high, the bucket leaves only at the
end of the sum. If the guess is too low, a gradient arrives after its bucket has left, and the sum is void. All members
then repeat the sum, and every bucket leaves at its end. So it is in a newcomer's first sum, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buckets import (
    PATIENCE,
    Arrived,
    Bucket,
    Sums,
    bitmap,
    lay_out,
    numbers_in,
    unused_sums,
)
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.transport.device import HOST, asynchronous, current_stream, is_capturing
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

WAITING_BYTES = 256 << 10
"""Largest size of small gradients that wait to be added together. More would not stay in the processor's cache."""

_CAPTURED = (
    "a backward inside of torch.cuda.graph: a hook takes each gradient when autograd makes it, which it does once, "
    "while the graph is captured, and in no replay: take torch.cuda.make_graphed_callables in front of the loop, or "
    'torch.compile(model, mode="reduce-overhead")'
)


@dataclass(slots=True)
class _Body:
    """The shard on which the script works."""

    weight: float
    "the shard's part of the step's samples"
    is_final: bool
    "the shard is the member's last one in this attempt"
    is_live: bool
    "False in a rehearsal"
    in_backward: bool = False


class Reduction:
    """Sums gradients over shards and members. Made once per run.

    Call `begin`, then `begin_body` and `end_body` for each shard of this member, then `finish` and `give_out`. Hooks
    never raise: an error in a hook is raised by `end_body` or `finish`.

    Args:
        named: all parameters that could train, in model order. A parameter that is frozen now may train later.
        arithmetic: adds the gradients up.
        buffers: buffers of the modules, which members share together with the sums.

    Raises:
        FallowError: parameters and buffers are on several devices, or the arithmetic has no sum for their type.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], arithmetic: Arithmetic, buffers: StepBuffers) -> None:
        self._names = [name for name, _ in named]
        self._params = [parameter for _, parameter in named]
        devices, of_buffers = ({tensor.device for tensor in some} for some in (self._params, buffers.live()))
        if devices.isdisjoint(of_buffers):  # those of a frozen copy, such as a moving average, may lie on the host
            devices |= of_buffers
        if len(devices) > 1:
            raise FallowError(
                f"parameters and buffers lie on several devices, {', '.join(sorted(map(str, devices)))}; Fallow trains "
                "with one device per worker: move the models to it before run.prepare",
                Exit.DATA,
            )
        self._device = next(iter(devices), HOST)
        self.arithmetic = arithmetic
        self.buffers = buffers
        self._group = Group(0, 0, 1, None)
        self.order: list[int] | None = None
        "parameters in the order of rank 0's gradients in the run's first sum; None: there was no sum yet"
        self._touched: dict[int, None] = {}
        "parameters that received a gradient in this attempt, in the order of their first gradients"
        self._places: list[tuple[Bucket, int]] = []
        "by parameter: its bucket, and its place in the bucket"
        self._unused: dict[str, list[int]] = {}
        "phase -> by bucket, number of latest sums without gradients on any member, see `unused_sums`"
        self._first_order = [n for n in reversed(range(len(self._params))) if self._params[n].requires_grad]
        "order until the first sum gives one; kept, since a script may freeze parameters until then"
        self._lay_out()
        self._phase = ""
        self._takes_gradients = False
        "gradients are taken: between `begin` and `give_out`, in bodies that are not rehearsals"
        self._body: _Body | None = None
        self._stream: torch.Stream | None = None
        "stream of the latest work and of the waiting gradients; None on the host"
        self._next = 0
        "number of the bucket that leaves next"
        self._leave_at_end = False
        "no bucket leaves before the end of this sum"
        self._is_void = False
        "in this attempt a gradient came after its bucket had left, on this member"
        self._returning: set[int] = set()
        "buckets that received gradients in void attempts at this sum, on any member; empty: no void attempt"
        self.repeated_sums = 0
        "number of finished sums that had a void attempt"
        self._mistake: Exception | None = None
        "exception that was raised in a hook"
        self._handed_gradients: list[torch.Tensor | None] = [None] * len(self._params)
        self.sums_of = 0
        "1 + generation in which this member received the sums of this attempt; 0: it lacks them"
        self.has_no_gradients = False
        "no member made a backward in the last sum"
        self.after_backward: Callable[[], None] = lambda: None
        "called when a backward is over"
        for index, parameter in enumerate(self._params):
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # no hook is taken otherwise
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not frozen)

    def attach(self, group: Group) -> None:
        """Sum over another generation's group from now on."""
        if self._group.broken is not None:  # it was abandoned, and may still write into the memory of its sums
            self.arithmetic.renew()
            self.buffers.renew()
        self._group = group

    # ------------------------------------------------------------------------------------------------- one attempt

    def begin(self, phase: str, shares: Sequence[int] = (), *, leave_at_end: bool = False) -> None:
        """Begin an attempt at the sum of a phase. All gradients become None.

        Args:
            phase: its name.
            shares: see `Arithmetic.begin`; empty: each member has one shard.
            leave_at_end: no bucket leaves before `finish`.
        """
        self._handed_gradients = [None] * len(self._params)
        self._clear()
        self._phase, self._takes_gradients, self.sums_of, self.has_no_gradients = phase, True, 0, False
        self._mistake, self._next, self._touched, self._is_void = None, 0, {}, False
        # A newcomer does not know of the others' second backwards, and in its first sum would make all begin anew.
        is_guess = self.order is not None and phase not in self._most_of_late
        self._leave_at_end = leave_at_end or is_guess or bool(self._returning)
        self._most = [0] * len(self._buckets)
        for bucket, sums in zip(self._buckets, self._unused_sums(), strict=True):
            bucket.has_left = sums >= PATIENCE and bucket.number not in self._returning
        self.arithmetic.begin(shares or [1] * self._group.size, self._group.rank)

    def begin_body(self, weight: float, *, final: bool, live: bool = True) -> None:
        """Begin with a shard.

        Args:
            weight: the shard's part of the step's samples; 0 for a copy that counts nothing.
            final: it is the member's last one in this attempt.
            live: False in a rehearsal: gradients stay as autograd makes them.
        """
        self._body = _Body(weight, final, live)
        self._stream = self._stream or current_stream(self._device)
        self._follow_stream()
        of_late = self._most_of_late.get(self._phase, [self._guess])
        for bucket, *counts in zip(self._buckets, self._most, *of_late, strict=True):
            bucket.count, bucket.expected = 0, max(counts)
        self.arithmetic.begin_body()

    def end_body(self) -> None:
        """End the shard.

        Raises:
            FallowError: a backward raised and the body went on, or something went wrong in a hook.
        """
        body, self._body = self._body, None
        if body is not None and body.in_backward:
            raise FallowError(
                "a backward raised and the body went on, though a part of its gradients is counted already: let the "
                "exception end the script, or leave the batch out before its backward",
                Exit.DATA,
            )
        if self._mistake is not None and not isinstance(self._mistake, Interrupted):
            raise self._mistake
        if body is not None and body.is_live and self._takes_gradients:
            self._most = [max(most, bucket.count) for most, bucket in zip(self._most, self._buckets, strict=True)]

    def finish(self, tell: Callable[[Sums], Sums]) -> Sums:
        """Complete the sums of this attempt on all members.

        Args:
            tell: tells all members this one's part, and returns all parts joined. It is called when this member has
                the sums.

        Returns:
            What all members say.

        Raises:
            Interrupted: the group broke; only others may have the sums.
            FallowError: something went wrong in a hook.
        """
        if self._mistake is not None:
            raise self._mistake
        self._follow_stream()
        with torch.no_grad():
            self._launch_ready(launch_all=True)
            self.buffers.share(self._group)
            self.arithmetic.conclude(self._group)
            self._group.wait_and_verify()  # only now may this member say that it has the sums
        decides_order = self._touched and self._group.rank == 0 and self.order is None
        self.sums_of = self._group.generation + 1
        return tell(
            Sums(
                is_void=self._is_void,
                touched=bitmap(self._touched, len(self._params)),
                order=list(self._touched) if decides_order else None,
            )
        )

    def give_out(self, sums: Sums) -> bool:
        """Make gradients of the sums that all members have; None for a parameter that nobody touched.

        Args:
            sums: what all members say.

        Returns:
            False if all members must do the phase again, because the sum is void.
        """
        self.sums_of = 0
        touched = numbers_in(sums.touched)
        used_buckets = {bucket.number for bucket in self._buckets if not touched.isdisjoint(bucket.members)}
        if sums.is_void:
            self._returning |= used_buckets
            return False
        # Not earlier: if the group breaks, only some members may know of a void attempt.
        self.repeated_sums, self._returning = self.repeated_sums + bool(self._returning), set()
        self._takes_gradients = False
        self.has_no_gradients = not touched
        with torch.no_grad():
            for number in used_buckets:
                bucket = self._buckets[number]
                for index, grad in zip(bucket.members, self.arithmetic.results(bucket), strict=True):
                    self._handed_gradients[index] = self._params[index].grad = grad if index in touched else None
        self._most_of_late.setdefault(self._phase, deque([self._guess], maxlen=PATIENCE)).append(self._most)
        unused = enumerate(self._unused_sums())
        self._unused[self._phase] = [unused_sums(before, is_used=n in used_buckets) for n, before in unused]
        if sums.order is not None and self.order is None:
            self.order = sums.order
            self._lay_out()
        return True

    def drop(self) -> None:
        """Discard this attempt."""
        self._takes_gradients, self.sums_of, self._body = False, 0, None
        self._clear()

    def forget(self) -> None:
        """Discard this attempt and what void attempts have shown, because the group has changed."""
        self.drop()
        self._returning = set()

    def accept_gradients(self) -> None:
        """Count the present gradients as handed out. Call when an optimizer's closure has made them."""
        self._handed_gradients = [parameter.grad for parameter in self._params]

    def has_stray_gradients(self) -> bool:
        """Return True if the script made gradients outside of inner loops and optimizer steps."""
        now = map(attrgetter("grad"), self._params)
        pairs = zip(now, self._handed_gradients, strict=True)
        return any(grad is not None and grad is not handed for grad, handed in pairs)

    def has_leftovers(self) -> bool:
        """Return True if gradients of the last sum are still there: the next sum replaces them."""
        pairs = zip(self._params, self._handed_gradients, strict=True)
        return any(handed is not None and parameter.grad is handed for parameter, handed in pairs)

    def export(self) -> dict[str, Any]:
        """Return replicated state that a newcomer needs, as plain values."""
        return {
            "idle": dict(sorted(self._unused.items())),
            "order": self.order,
            "repeated": self.repeated_sums,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over an exported state."""
        self.order, self.repeated_sums = state["order"], state.get("repeated", 0)
        self._lay_out()
        self._unused = dict(state["idle"])

    # ------------------------------------------------------------------------------------------------- in backward

    def _follow_stream(self) -> None:
        """Follow autograd to the current stream: a gradient is made on the stream that used the parameter in forward.

        Waiting gradients are added on the stream that made them, since that stream may reuse their memory.
        """
        stream, before = current_stream(self._device), self._stream
        if stream is None or before is None or stream == before:
            return
        with before:
            for bucket in self._buckets:
                if bucket.waiting:
                    self._fill(bucket, bucket.take_waiting())
        stream.wait_stream(before)
        self._stream = stream

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        parameter, places = self._params[index], self._places
        size = 0 if asynchronous(parameter.device) else parameter.nbytes  # a device adds a whole bucket in one kernel

        def hook(_: torch.Tensor) -> None:
            body = self._body
            if body is None or not (body.in_backward or self._begin_backward(body, index)) or not body.is_live:
                return
            if not size:
                self._follow_stream()
            if body.weight:
                self._touched[index] = None
            bucket, place = places[index]
            arrived = place, parameter.grad
            parameter.grad = None
            bucket.count += 1
            if size >= WAITING_BYTES:
                self._fill(bucket, [arrived])  # type: ignore[list-item]
                return
            bucket.waiting.append(arrived)  # type: ignore[arg-type]
            bucket.waiting_bytes += size
            if bucket.count == bucket.expected or bucket.waiting_bytes >= WAITING_BYTES:
                self._fill(bucket, bucket.take_waiting())

        return hook

    def _begin_backward(self, body: _Body, index: int) -> bool:
        """Call for the first gradient of a backward; False if the body does not take gradients."""
        if is_capturing(self._device):
            self._mistake = self._mistake or FallowError(_CAPTURED, Exit.DATA)
            return False
        if not self._takes_gradients:
            # Only a loop that finishes inside of a body, at the end of its backward, can see this.
            self._mistake = self._mistake or FallowError(
                f"{self._names[index]} received a gradient twice in one backward, or in a second one, when the step's "
                "sums were complete; call torch.utils.checkpoint with use_reentrant=False, and make one backward per "
                "body or use the loop in two levels, `for update in run.updates(loader)`",
                Exit.DATA,
            )
            return False
        body.in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def _end_backward(self) -> None:
        """Called by autograd at the end of a backward, unless the backward raised.

        Reentrant activation checkpointing runs backwards inside of another backward. Each of them has its own end.
        """
        if self._body is not None:
            self._body.in_backward = False
        self._follow_stream()
        for bucket in self._buckets:
            if bucket.waiting:
                self._fill(bucket, bucket.take_waiting())
        self.after_backward()

    def _fill(self, bucket: Bucket, arrived: Arrived) -> None:
        """Add gradients that have arrived, and launch complete buckets."""
        if torch.is_grad_enabled():  # in a backward with create_graph=True; the context costs 20 us and more
            with torch.no_grad():
                self._fill(bucket, arrived)
            return
        try:
            self._add(bucket, arrived)
            if self._body is not None and self._body.is_final and bucket.count >= bucket.expected:
                self._launch_ready()
        except Exception as error:
            self._mistake = self._mistake or error

    def _add(self, bucket: Bucket, arrived: Arrived) -> None:
        weight = self._body.weight if self._body is not None else 0.0
        if not arrived or not weight or self._mistake is not None:
            return
        for place, grad in arrived:
            index = bucket.members[place]
            if grad.layout is not torch.strided:
                raise FallowError(
                    f"{self._names[index]} has a sparse gradient, which Fallow does not reduce; build the layer with "
                    "sparse=False",
                    Exit.DATA,
                )
        if bucket.has_left:
            self._is_void = True
        else:
            self.arithmetic.add(bucket, arrived, weight)

    def _launch_ready(self, *, launch_all: bool = False) -> None:
        """Launch the next buckets that are complete, all of them with `launch_all`. Raises Interrupted."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not launch_all and (self._leave_at_end or bucket.count < bucket.expected):
                return
            self._add(bucket, bucket.take_waiting())
            if not bucket.has_left:
                bucket.has_left = True
                self.arithmetic.launch(self._group, bucket)
            self._next += 1

    def _lay_out(self) -> None:
        self._buckets = lay_out(self._params, self._first_order if self.order is None else self.order)
        places = {index: (bucket, place) for bucket in self._buckets for place, index in enumerate(bucket.members)}
        self._places[:] = [places[index] for index in range(len(self._params))]
        self._unused = {}
        self._guess = [len(bucket.members) for bucket in self._buckets]
        "by bucket, gradients in a body of which nothing is known"
        self._most = self._guess
        "by bucket, the most gradients in a body of this attempt"
        self._most_of_late: dict[str, deque[list[int]]] = {}
        "phase -> the same for each sum of late that was given out; begins with the guess"
        self.arithmetic.lay_out(self._buckets)

    def _unused_sums(self) -> list[int]:
        """Return the numbers of the current phase. Buckets of frozen parameters are expected to stay unused."""
        if self._phase in self._unused:
            return self._unused[self._phase]
        return [0 if any(p.requires_grad for p in bucket.params) else PATIENCE for bucket in self._buckets]

    def _clear(self) -> None:
        for parameter in self._params:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.take_waiting()
