"""Gradients of a step: local accumulation over shards, one reduction in the member's last body. No DDP.

Void bodies of equal weight let autograd add up their gradients as it does without us; only between two backwards they
are held here, so a void body leaves None behind. In the final body a hook puts weight x gradient into the parameter's
place in a flat bucket, one pass over the memory, and lets go of it. Small ones wait for each other (`speakers`), not
for long: they lie between the large ones that come and go, and would have the allocator ask the system for fresh pages
in each step. Buckets are reduced in a fixed order, each as soon as it is full, so that the network works while backward
goes on. Beside the last one goes the control exchange, a small float64 vector.

What runs in each step is kept short in Python: after a pass over the model all that it touches has left the caches, and
a call costs several times what it does in a loop by itself.

With several backwards in a body each has sums of its own: the first backward of the final body reduces the first
backwards of all bodies, the second the second ones. So what a backward returns does not depend on the membership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.reduction import control as ctl
from fallow.worker.reduction.arithmetic import Arithmetic, Floating, all_zero
from fallow.worker.reduction.buckets import Bucket, Buckets
from fallow.worker.reduction.buffers import SharedBuffers
from fallow.worker.reduction.control import Control, StepPlan
from fallow.worker.reduction.idle import Idle
from fallow.worker.reduction.speakers import Speakers
from fallow.worker.transport.group import Group, Interrupted

_grad = attrgetter("grad")


@dataclass(slots=True)
class _Loss:
    """Of one backward; `value` stays on an accelerator until somebody must wait for it anyway."""

    shard: int
    value: float | torch.Tensor
    scale: float
    weight: float


class EndedAlone(Exception):
    """This member's script has ended inside of a loop in which others go on. Never reaches the user's code."""


class Reducer:
    """Accumulates and reduces the gradients of all prepared modules.

    Args:
        named: parameters that require gradients, in model order.
        buffers: of the modules.
        arithmetic: how gradients are added up.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        buffers: SharedBuffers,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self._names = [name for name, _ in named]
        self._params = [parameter for _, parameter in named]
        self.buffers = buffers
        self._arithmetic = arithmetic or Floating()
        self._order: list[int] = []
        "in which the parameters are laid out"
        self._sets = [self._laid_out()]
        "by number of the backward in a body"
        self._group = Group(0, 0, 1, None)
        self._plan = StepPlan(0, 0, 0, 1)
        self._speakers = Speakers(self._params, self._make_hook)
        self._live = False
        self._final = False
        self._shard = 0
        self._weight = 0.0
        self._number = 0
        "backwards finished in this body: which of the sets is at work"
        self._plain = False
        "gradients are put into the buckets in their own type"
        self._touched = [[False] * len(self._params)]
        "by number of the backward: parameters with something in their place"
        self._fired = [False] * len(self._params)
        self._sums: list[int | None] = []
        "by parameter: version of the sum of void bodies that lies in the place of its gradient; empty: there is none"
        self._adding = False
        "the hooks put gradients into buckets in this body"
        self._in_backward = False
        self._held: dict[int, tuple[float, list[torch.Tensor | None]]] = {}
        "number of the backward -> weight, and sums of the gradients of void bodies of that weight"
        self._left: dict[int, torch.Tensor] = {}
        "gradients that the user left from earlier steps"
        self._carried: dict[int, torch.Tensor] = {}
        self._next = 0
        self._idle = Idle()
        self._told: list[torch.Tensor] | None = None
        "the control exchange under way"
        self.rounds = 0
        "finished reductions in this step"
        self.control: Control | None = None
        "of the last round"
        self.loss: float | None = None
        "mean loss of the step, summed over its rounds; None: no backward of a scalar"
        self.switch = 0
        "members that saw the next generation committed, in any round of this step"
        self.checkpoint = False
        "a member wishes a checkpoint and none has something against it"
        self.used = False
        "some member had a gradient in this step"
        self.interrupted = False
        "the step is void: the group broke, or the arithmetic wants it again"
        self.again = False
        "the step must be done again by all members, though the group stands"
        self.pace = 0.0
        "seconds per shard of this member, told to all"
        self._losses: list[_Loss] = []
        self.elastic = False
        "the membership may change"
        self.skipped = False
        "the final body made no backward"
        self.left = self.ended = False
        "the script has left the loop, or it is over: this is no step, only the question whether all have"
        self.agreement = 0
        "32 bits that must be the same on all members in this step"
        self.frozen = 0
        "likewise, of what is frozen in the final body; 0: that made no backward"
        self.resting = 0
        "likewise, of modules in eval()"
        self.piece = 0
        "checksum of a piece of the weights"
        self.drift = False
        "members' weights may differ in what kernels make of them"
        self._came: list[int] | None = []
        "parameters, as their gradients come; None: their order was taken"
        self.gathered: set[int] = set()
        "ids of parameters whose gradient has a part from before this step, which a newcomer would not have"
        self.samples = 0
        self.crc = 0
        self.flags: Callable[[], tuple[bool, float]] = lambda: (False, 0.0)
        "asked when the control vector leaves: (switch is committed, wish for a checkpoint, see `Saver.wish`)"
        self.before_control: Callable[[], None] = lambda: None
        "called once per step, just before this member's contribution can be complete on others"
        self.complete: Callable[[], bool] = lambda: True
        "this member has all of the state: until then its last bucket stays here, and with it everybody's optimizer"

    # ----------------------------------------------------------------------------------------- steps and bodies

    def attach(self, group: Group, order: Sequence[int] = ()) -> None:
        """Reduce over another generation's group from now on.

        Args:
            group: its group.
            order: in which all its members lay their parameters out, see `Buckets`.
        """
        if self._group.broken is not None:
            self._forget()  # a late peer may still write into them
        if self._order != list(order):
            self._order = list(order)
            self._sets = [self._laid_out() for _ in self._sets]
            self._speakers.forget()
        self._arithmetic.forget()
        self.buffers.attach()
        self._idle.forget()
        self._group = group

    def take_order(self) -> list[int] | None:
        """Indices of all parameters, as the first gradients came, then those without; None: it was taken before."""
        came, self._came = self._came, None
        return None if came is None else list(dict.fromkeys([*came, *reversed(range(len(self._params)))]))

    def begin_step(self, plan: StepPlan) -> None:
        """Start a step; contributions of an interrupted one are dropped."""
        if not (self.interrupted and (plan.step, plan.phase) == (self._plan.step, self._plan.phase)):
            self._left = {}
        self._plan = plan
        self._number = 0
        self._touched = [[False] * len(self._params) for _ in self._sets]
        self._held = {}
        self._in_backward = False
        self._carried = dict(self._left)
        self._plain = self._arithmetic.begin_step(plan.phase, plan.lone)
        for buckets in self._sets:
            buckets.lay(plain=self._plain)
        self.buffers.begin_step()
        self.skipped = False
        self.gathered.clear()
        if self.elastic:
            self.gathered.update(id(self._params[index]) for index in self._left)
        self.rounds = 0
        self.control = None
        self.used = False
        self.interrupted = self.again = False
        self.loss = None
        self.switch, self.checkpoint = 0, False
        self._losses = []
        self.samples = self.crc = 0
        self.frozen = self.resting = 0

    def begin_body(self, shard: int, weight: float, *, final: bool, live: bool) -> None:
        """Start a body.

        Args:
            shard: its number in the step.
            weight: the shard's part of the step's samples (0 for a copy that counts nothing).
            final: the member's last body of the step: a backward in it reduces.
            live: False in a rehearsal: gradients are dropped.
        """
        self._shard = shard
        self._number = 0
        self._weight = weight
        self._final = final
        self._live = live
        self._adding = live and (final or not self._arithmetic.linear)
        for number, (held_weight, _) in list(self._held.items()):
            if held_weight != weight:
                self._fold(number)

    def rest(self) -> None:
        """The script is outside of `run.steps`: gradients are its own affair."""
        self._adding = False

    def add_loss(self, value: torch.Tensor, scale: float) -> None:
        """Count the loss of one backward in the current body: `value` / `scale`, a mean over the shard."""
        if self._weight:
            # An accelerator is asked for its value later: here it would have to finish the forward first.
            kept = float(value) if value.device.type == "cpu" else value.clone()
            self._losses.append(_Loss(self._shard, kept, scale, self._weight))

    def read_losses(self) -> None:
        """Wait until the values of all losses so far are here."""
        for loss in self._losses:
            loss.value = float(loss.value)

    def before_backward(self) -> None:
        """Put gradients aside that are there already: of the round before, or left by the user on purpose."""
        while len(self._sets) <= self._number:
            self._sets.append(self._laid_out())
            self._sets[-1].lay(plain=self._plain)
            self._touched.append([False] * len(self._params))
        self._buckets.ensure()
        if self._in_backward and self._live and not self._adding:
            self._hold()  # the last backward raised, and the script goes on
        self._in_backward = True
        if self.gathered and self.rounds:
            self._ungather()
        # Zeros that zero_grad(set_to_none=False) has left are no gradient: a newcomer has none in their place.
        grads = [(index, grad) for index, grad in enumerate(map(_grad, self._params)) if grad is not None]
        left = self._live and bool(grads) and (self.rounds > 0 or not all_zero([grad for _, grad in grads]))
        for index, grad in grads:
            self._put_aside(index, grad, left=left)
        held = self._held.pop(self._number, None)
        self._sums = []
        if held is not None:
            for parameter, grad in zip(self._params, held[1], strict=True):
                parameter.grad = grad
            self._sums = [None if grad is None else grad._version for grad in held[1]]
        self._fired = [False] * len(self._params)
        self._speakers.begin(self._buckets.all)
        for bucket in self._buckets.all:
            bucket.launched = False
        self._next = 0

    def _ungather(self) -> None:
        """Between two backwards of the final body the script may have dropped what it had left."""
        assert self.control is not None
        for index, parameter in enumerate(self._params):
            grad = parameter.grad
            # Zeros, too, if a newcomer has them: the round gave it something to make them of.
            if grad is None or (self.control.touched[index] and not grad.any()):
                self.gathered.discard(id(parameter))

    def _put_aside(self, index: int, grad: torch.Tensor, *, left: bool) -> None:
        if left and (self.rounds or bool(grad.any())):
            if self.elastic and not self.rounds:
                self.gathered.add(id(self._params[index]))
            carried = self._carried.get(index)
            grad = grad.detach()
            self._carried[index] = grad.clone() if carried is None else carried + grad
            if not self.rounds:
                self._left[index] = self._carried[index]
        self._params[index].grad = None

    def after_backward(self) -> None:
        """The end of an outermost backward: in the final body the round is completed here."""
        if self._adding:
            if not self.interrupted:
                self._speakers.end(self._buckets)
            if not self._final:
                self._add_unspoken()
        self._arithmetic.settle()
        if not self._live:
            self._drop()
        elif self._final:
            self.finish_round()
        elif self._arithmetic.linear:
            self._hold()
        self.next_backward()

    def next_backward(self) -> None:
        """What follows belongs to the body's next backward."""
        self._in_backward = False
        self._number += 1

    def finish_round(self) -> None:
        """Reduce what is left, exchange control, give out gradients. After an interrupt gradients are None."""
        try:
            if not self.interrupted:
                self._give_out(*self._exchange())
                return
        except Interrupted:
            self.interrupted = True
        self._drop()
        if not self.again:
            self._forget()

    def finish_step(self) -> None:
        """All rounds of the step are done, on all members.

        Raises:
            FallowError: a body had more backwards than the final ones, so their gradients are in no sum.
        """
        assert self.control is not None
        if self.control.head.more:
            raise FallowError(
                f"step {self._plan.step}: a body made more than {self.rounds} backward calls, as many as the final "
                "bodies made; every body must make the same number of them (add the losses up, or use 0 * loss)",
                Exit.DATA,
            )
        self._arithmetic.end_step()

    # ---------------------------------------------------------------------------------------------- accumulation

    def _hold(self) -> None:
        """Take the gradients of a void body away until the same backward of the next body."""
        grads = [parameter.grad for parameter in self._params]
        if any(grad is not None for grad in grads):
            self._held[self._number] = self._weight, grads
            self._drop()

    def _fold(self, number: int) -> None:
        """Put what is held into the buckets: the next body has another weight."""
        weight, grads = self._held.pop(number)
        for index, grad in enumerate(grads):
            if grad is not None:
                self._add(number, index, grad, weight)

    def _add(self, number: int, index: int, grad: torch.Tensor, weight: float) -> None:
        if grad.layout != torch.strided:
            raise FallowError(
                f"{self._names[index]} has a sparse gradient, which Fallow does not reduce; "
                "build the layer with sparse=False",
                Exit.DATA,
            )
        if grad.requires_grad:
            grad = grad.detach()
        touched = self._touched[number]
        place = self._sets[number].views[index]
        if not weight:  # 0 x infinity would not be nothing
            if not touched[index]:
                place.zero_()
            return
        self._arithmetic.add(number, index, place, grad, weight, first=not touched[index])
        touched[index] = True

    def _drop(self) -> None:
        for parameter in self._params:
            parameter.grad = None

    # ---------------------------------------------------------------------------------------------- reduction

    def _laid_out(self) -> Buckets:
        return Buckets(self._params, self._arithmetic.sum_dtype, self._order)

    @property
    def _buckets(self) -> Buckets:
        return self._sets[self._number]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        params, speakers, add, strided = self._params, self._speakers, self._arithmetic.add, torch.strided

        def hook(parameter: torch.Tensor) -> None:
            if self._came is not None and (self._adding or not self._live):
                self._came.append(index)
            if not self._adding:
                return
            if self.interrupted:
                parameter.grad = None
                return
            number, weight, fired, sums = self._number, self._weight, self._fired, self._sums
            buckets, touched = self._sets[number], self._touched[number]
            bucket, views = buckets.of[index], buckets.views
            if bucket.launched:
                raise self._twice(index)
            plain = weight and not torch.is_grad_enabled()  # create_graph=True
            whole = not fired[index]
            for one in speakers.spoken_for[index]:
                owner = params[one]
                grad = owner.grad
                if grad is None or (sums and one != index and sums[one] == grad._version):
                    whole = False
                    speakers.missing()
                    continue
                owner.grad = None
                if plain and grad.layout is strided:  # `_add`, but for a call
                    add(number, one, views[one], grad, weight, first=not touched[one])
                    touched[one] = True
                else:
                    self._add(number, one, grad, weight)
                fired[one] = True
            if speakers.learned is None:
                speakers.heard(index)
            if whole:
                bucket.waiting -= 1
                if not bucket.waiting and self._final:
                    self._launch_ready()

        return hook

    def _add_unspoken(self) -> None:
        """Gradients for which nobody has spoken, in a body behind which no bucket is reduced."""
        for index, grad in enumerate(map(_grad, self._params)):
            if grad is not None:
                self._params[index].grad = None
                if not self.interrupted:
                    self._add(self._number, index, grad, self._weight)

    def _twice(self, index: int) -> FallowError:
        return FallowError(
            f"{self._names[index]} received a gradient twice in one backward; "
            "call torch.utils.checkpoint with use_reentrant=False",
            Exit.DATA,
        )

    def _fill(self, bucket: Bucket, *, zeros: bool) -> None:
        """What nobody has spoken for, or void bodies held, goes to its place, too; else `zeros`."""
        fired, touched = self._fired, self._touched[self._number]
        for index in bucket.members:
            if fired[index] and touched[index]:
                continue
            grad = self._params[index].grad
            if grad is not None:
                self._params[index].grad = None
                self._add(self._number, index, grad, self._weight)
            elif zeros and not touched[index]:
                self._buckets.views[index].zero_()

    def _launch_ready(self, *, all_of_them: bool = False) -> None:
        buckets = self._buckets.all
        try:
            while self._next < len(buckets):
                bucket = buckets[self._next]
                if not all_of_them and bucket.waiting:
                    return
                if self._next == len(buckets) - 1 and not all_of_them and not self.complete():
                    return
                stays = self._idle.stays(self._plan.phase, self.rounds, self._next)
                self._fill(bucket, zeros=not stays)
                self._arithmetic.settle()
                if self._next == 0 and self.rounds == 0:
                    self.before_control()
                if not stays:
                    self._arithmetic.reduce(self._group, bucket)
                bucket.launched = True
                self._next += 1
                if self._next == len(buckets):
                    self._tell()
        except Interrupted:
            self.interrupted = True

    def _tell(self) -> None:
        """Launch what goes beside the sums, behind the last bucket, which takes longer."""
        self.buffers.launch(self._group, self._plan.phase, self.rounds)
        switch, checkpoint = self.flags()
        plan, first = self._plan, self.rounds == 0
        further = any(any(touched) for touched in self._touched[self._number + 1 :])
        head = ctl.Head(
            contributors=1.0,
            switch=float(switch),
            checkpoint=checkpoint,
            step=float(plan.step),
            round=float(self.rounds),
            samples=float(self.samples) if first else 0.0,
            crc=float(self.crc) if first else 0.0,
            scalars=float(bool(self._losses)),
            more=float(further or bool(self._held)),
            agreement=float(self.agreement),
            skipped=float(self.skipped),
            left=float(self.left),
            ended=float(self.ended),
            buffers=float(self.buffers.changed),
            frozen=float(self.frozen),
            resting=float(self.resting),
        )
        self.read_losses()
        losses: dict[int, float] = {}
        for loss in self._losses:
            losses[loss.shard] = losses.get(loss.shard, 0.0) + float(loss.value) / loss.scale * loss.weight
        extent = self._arithmetic.extent(self._number, len(self._params))
        touched = self._touched[self._number]
        self._told = self._group.tell(ctl.encode(head, self.pace, self.piece, losses, plan.most, touched, extent))

    def _exchange(self) -> tuple[Control, dict[int, torch.Tensor]]:
        """What the members told each other, and the gradients."""
        if not self._buckets.all:
            if self.rounds == 0:
                self.before_control()
            self._tell()
        self._launch_ready(all_of_them=True)
        if self.interrupted:
            raise Interrupted("the group broke in this step")
        self._group.wait()
        told, self._told = self._told, None
        assert told is not None
        control = ctl.decode(told, self._plan.shards, self._plan.most, len(self._params))
        self.buffers.settle(self._group, changed=control.head.buffers > 0)
        if self.elastic and control.head.ended and control.head.left < self._group.size:
            if self.ended:
                raise EndedAlone
            # By `sys.exit`, say: its exit code tells whether it is to blame. To the others it is one that was lost.
            self._group.interrupt("a member's script has ended inside of the loop")
            raise Interrupted("a member's script has ended inside of the loop")
        ctl.check(
            control,
            self._plan,
            self._group.size,
            self.rounds,
            self.agreement,
            frozen=self.frozen,
            resting=self.resting,
            drift=self.drift,
        )
        late = self._idle.count(self._plan.phase, self.rounds, self._buckets.all, control.touched)
        for bucket in late:
            self._fill(bucket, zeros=True)
            self._arithmetic.reduce(self._group, bucket)
        if late:
            self._group.wait()
        if not self._arithmetic.judge(self._number, control.extent):
            self.again = True
            raise Interrupted("the sums are not good")
        with torch.no_grad():
            return control, self._arithmetic.results(self._group, self._buckets, control.touched)

    def _give_out(self, control: Control, results: dict[int, torch.Tensor]) -> None:
        self.control = control
        self.switch = max(self.switch, int(control.head.switch))
        self.checkpoint = self.checkpoint or control.head.checkpoint > 0
        self.rounds += 1
        self.loss = control.loss  # of all rounds so far
        self.used = self.used or bool(results)
        with torch.no_grad():
            for index, carried in self._carried.items():
                result = results.get(index)
                results[index] = carried if result is None else result.add_(carried)
            for index, parameter in enumerate(self._params):
                if parameter.grad is not None:
                    raise self._twice(index)
                parameter.grad = results.get(index)
        self._carried = {}

    def _forget(self) -> None:
        for buckets in self._sets:
            buckets.forget()
        self._held = {}
        self._touched = [[False] * len(self._params) for _ in self._sets]
