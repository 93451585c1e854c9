"""What people write that cannot be right with a changing membership: found early, refused with advice."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fallow.model import Exit, FallowError
from fallow.worker.guards.looks import Looks
from fallow.worker.handover.state import as_bytes, encode, plain_name
from fallow.worker.prepared.objects import Gate, Prepared
from fallow.worker.reduction.reducer import Reducer

_its_version = attrgetter("_version")

_CANARY = 1024
"""Elements of one parameter that are compared between the members in each step."""

_ONCE_PER_SHARD = (
    "which would happen once per shard: leave it to prepared optimizers, or write `if run.final_shard:` first, as for "
    "a moving average, a teacher that follows the model or weights that are clipped (an Embedding with max_norm "
    "changes its weights in forward: leave max_norm out)"
)


class Watch:
    """Looks at what bodies do to the prepared objects. One per run.

    Args:
        prepared: those objects.
        gate: what they ask before they act.
        elastic: the membership may change.
    """

    def __init__(self, prepared: Prepared, gate: Gate, *, elastic: bool) -> None:
        self._prepared = prepared
        self._gate = gate
        self._elastic = elastic
        self._looks = Looks(lambda: prepared.optimizers)
        self._begun = False
        "a step has ended"
        self._collectives = 0
        "that the script had begun by itself before the body"
        self._known: list[nn.Parameter] | None = None
        self._trainable: list[tuple[str, nn.Parameter]] = []
        self._weights: list[nn.Parameter] = []
        "the same without names"
        self._frozen: list[nn.Parameter] = []
        "those that are not; the script may change them by hand, as it does with a moving average"
        self._alone: list[tuple[int, str, nn.Parameter]] = []
        "trainable ones, with their numbers, that no prepared optimizer holds"
        self._parts: dict[int, str] = {}
        "names of the prepared modules and of all modules in them, by id"
        self._hooks: list[Any] = []
        self._first = True
        "no step of this call has ended: its bodies may still set things up"
        self._sizes: list[tuple[str, torch.Size, torch.dtype]] = []
        "of the buffers, when the call began"
        self._versions = self._frozen_versions = self._seen_version = 0
        self._before_step: list[int] = []
        self._strangers: WeakSet[Any] = WeakSet()
        "objects that were not prepared and have acted in the body at work"
        self._strangers_before: WeakSet[Any] = WeakSet()
        "and in those before it"
        self._rates_before: tuple[Any, ...] | None = None
        "after the last void body of this step"
        self._calls_before: set[tuple[int, float]] | None = None
        "in a void body of this step that came to a backward"

    # ------------------------------------------------------------------------------------------------ run.steps

    def begin_call(self) -> None:
        """A run.steps call begins.

        Raises:
            FallowError: what was prepared does not fit together, or has changed since the first call.
        """
        prepared = self._prepared
        now = [parameter for module in prepared.modules for parameter in module.parameters()]
        if self._known is None:
            self._known = now
            self._trainable = prepared.parameters()
            self._weights = [parameter for _, parameter in self._trainable]
            trainable = set(map(id, self._weights))
            self._frozen = [parameter for parameter in now if id(parameter) not in trainable]
        elif len(now) != len(self._known) or any(a is not b for a, b in zip(now, self._known, strict=True)):
            raise FallowError(
                "the prepared modules have other parameters than in the first run.steps loop: build the whole model "
                "before run.prepare, members must agree on it",
                Exit.DATA,
            )
        self._parts = {
            id(part): plain_name(f"model.{number}.{name}").rstrip(".")
            for number, module in enumerate(prepared.modules)
            for name, part in module.named_modules()
        }
        prepared.modes.look()
        self._check_optimizers()
        self._check_schedulers()
        self._check_hooks()
        self._first = True
        self._sizes = self._sizes_of_buffers()
        self._hooks = [module.register_forward_pre_hook(_NoForward(self._gate)) for module in prepared.modules]

    def end_call(self) -> None:
        """The call is over, however it ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _check_optimizers(self) -> None:
        prepared = self._prepared
        strange = prepared.strangers()
        if strange:
            raise FallowError(strange, Exit.DATA)
        held = [p for optimizer in prepared.optimizers for group in optimizer.param_groups for p in group["params"]]
        owned = {id(parameter) for parameter in held}
        self._alone = [(at, name, p) for at, (name, p) in enumerate(self._trainable) if id(p) not in owned]

    def _check_schedulers(self) -> None:
        prepared = self._prepared
        for number, optimizer in enumerate(prepared.optimizers):
            if getattr(optimizer.step, "_wrapped_by_lr_sched", False) and not any(
                _drives(thing, optimizer) for thing in prepared.others
            ):
                raise FallowError(
                    f"a learning-rate scheduler is attached to optimizer {number} ({type(optimizer).__name__}) but was "
                    "not prepared: it would step once per shard, and a member that joins would not have its state; "
                    "write run.prepare(..., scheduler)",
                    Exit.DATA,
                )

    def _check_hooks(self) -> None:
        hooks = [hook for p in self._known or () for hook in (p._post_accumulate_grad_hooks or {}).values()]
        if any(getattr(hook, "__module__", None) != Reducer.__module__ for hook in hooks):
            raise FallowError(
                "a prepared parameter has a hook of register_post_accumulate_grad_hook, which would see the sum of "
                "some of the step's shards, others on another member: do that work after backward, in the final body "
                "(`if run.final_shard:`), or use parameter.register_hook, which sees one shard's gradient",
                Exit.DATA,
            )

    # ---------------------------------------------------------------------------------------------------- steps

    def agreement(self, step: int, *, settled: bool) -> int:
        """32 bits that are the same on all members, if what they did until now to the prepared objects was.

        How often each object has acted in this generation; where all of the state is here (`settled`) hyperparameters,
        and in a reproducible run what schedulers hold of their metric, and a piece of one buffer, another one in each
        step.
        """
        there = (self._rates(), self._metrics(), self._piece_of_a_buffer(step)) if settled else ()
        # Numbers only: other hashes differ by process.
        return hash((tuple(self._prepared.acts), there)) & 0xFFFFFFFF

    def _metrics(self) -> tuple[float, ...]:
        """Unlike ones show in the learning rate only when it is lowered next, and not where one member is left then."""
        if not self._prepared.reproducible:
            return ()
        plateaus = [thing for thing in self._prepared.others if isinstance(thing, ReduceLROnPlateau)]
        return tuple(float(value) for thing in plateaus for value in (thing.best, thing.num_bad_epochs))

    def _piece_of_a_buffer(self, step: int) -> int:
        buffers = self._prepared.buffers() if self._prepared.reproducible else []
        return _checksum(buffers[step % len(buffers)]) if buffers else 0

    def piece(self, step: int) -> int:
        """A checksum of a piece of one parameter, another one in each step; 32 bits."""
        if not self._trainable:
            return 0
        return _checksum(self._trainable[step % len(self._trainable)][1])

    def begin_step(self, step: int) -> None:
        """Remember the weights that no prepared optimizer may change."""
        self._looks.begin_step(step)
        self._rates_before = self._calls_before = None
        self._before_step = [parameter._version for _, _, parameter in self._alone]

    def end_step(self, touched: Callable[[], list[bool]]) -> None:
        """Refuse an optimizer that was not prepared: it has changed weights from their gradients.

        Args:
            touched: gives, by parameter, whether it received a gradient in this step.
        """
        self._first, self._begun = False, True
        for (at, name, parameter), version in zip(self._alone, self._before_step, strict=True):
            if parameter._version != version and touched()[at] and not self._held(parameter):
                raise FallowError(
                    f"{name} was trained, but no prepared optimizer holds it: the state of its optimizer would not "
                    "reach a member that joins; write run.prepare(model, optimizer, ...)",
                    Exit.DATA,
                )

    def _held(self, parameter: nn.Parameter) -> bool:
        """A body may have given it to an optimizer, by add_param_group."""
        groups = [group for optimizer in self._prepared.optimizers for group in optimizer.param_groups]
        return any(parameter is held for group in groups for held in group["params"])

    # --------------------------------------------------------------------------------------------------- bodies

    def begin_body(self, *, void: bool, rehearsal: bool = False) -> None:
        """A body begins; `void` as at its end."""
        # Where the world is fixed there is no rehearsal.
        self._looks.begin_body(self._weights, void=void, thorough=rehearsal or not (self._elastic or self._begun))
        self._gate.refusal = None
        self._gate.calls = set()
        self._gate.steps = 0
        if self._strangers:
            self._strangers_before |= self._strangers
            self._strangers = WeakSet()
        self._prepared.modes.begin_body()
        self._versions = _version(self._weights)
        self._collectives = _own_collectives() if self._elastic else 0
        self._frozen_versions = _version(self._frozen) if void else 0

    def wrote(self) -> bool:
        """Whether this body has changed weights until now. What is written to `.data` is not seen."""
        self._seen_version = _version(self._weights)
        return self._seen_version != self._versions

    def wrote_again(self) -> bool:
        """Likewise, since `wrote` was asked."""
        return _version(self._weights) != self._seen_version

    def before_backward(self) -> None:
        """The first backward of a body begins.

        Raises:
            FallowError: it has changed weights in a way that does not come to the same if it is done again.
        """
        if self._looks.repeated():
            raise self._gate.refuse(f"each body changes weights before its backward, {_ONCE_PER_SHARD}")

    def acts(self, thing: Any) -> None:
        """An optimizer, a moving average or a GradScaler acts.

        One that was not prepared may live within a body, on tensors of its own: an attack, a copy that is looked at.

        Raises:
            FallowError: it was not prepared, and trains a prepared module, or has acted in another body, too.
        """
        gate = self._gate
        if not gate.in_body or gate.acting or any(thing is known for known in self._prepared.optimizers):
            return
        if isinstance(thing, torch.amp.GradScaler):
            here = thing.is_enabled()
        else:
            groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else []
            held = {id(parameter) for group in groups for parameter in group["params"]}
            here = thing in self._strangers_before or not held.isdisjoint(map(id, self._weights))
        if here:
            raise gate.refuse(
                f"a body has an object ({type(thing).__name__}) act that was not prepared: it would act once per "
                "shard, what it changes would come apart, or a member that joins would not have its state; write "
                "run.prepare(model, optimizer, ..., it), with all modules that are trained"
            )
        self._strangers.add(thing)

    def adds(self, module: nn.Module, name: str, parameters: list[nn.Parameter]) -> None:
        """A module gets parameters, by themselves or in another module.

        Raises:
            FallowError: a body gives a prepared module new ones.
        """
        where = self._parts.get(id(module))
        if where is None or not self._gate.in_body:
            return
        known = set(map(id, self._known or ()))
        if any(id(parameter) not in known for parameter in parameters):
            raise self._gate.refuse(
                f"a body adds parameters ({where}.{name}) to a prepared module: there is no place for them in the "
                "members' sums, and the model of a member that joins is without them; build the whole model before "
                "run.prepare, and leave what is to come later out of forward until then, or freeze it after run.prepare"
            )

    def check_buffers(self) -> None:
        """Before anything is made of buffers: they are told to the other members, and put back for the next shard.

        Raises:
            FallowError: a forward has changed the shape or type of one.
        """
        now = self._sizes_of_buffers()
        if now != self._sizes:
            known = set(self._sizes)
            name = next((entry[0] for entry in now if entry not in known), "that was removed")
            raise self._gate.refuse(
                f"buffer {name} changed its shape or type in forward: give it its full size before run.prepare, or "
                "hold it as a plain attribute"
            )

    def _sizes_of_buffers(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(name, buffer.shape, buffer.dtype) for name, buffer in self._prepared.named_buffers()]

    def end_body(self, *, void: bool, trained: bool) -> None:
        """A body has ended.

        Args:
            void: it was not the step's last one on this member, or a rehearsal.
            trained: it has made a backward.

        Raises:
            FallowError: what was refused in it, even if the body has caught that; or it has done what it must not.
        """
        gate = self._gate
        gate.stepped = False
        if gate.refusal is not None:
            raise gate.refusal
        self.check_buffers()
        if self._elastic and _own_collectives() > self._collectives:
            raise FallowError(
                "a body has made a collective of torch.distributed over the script's own process group, which does not "
                "follow the membership: who joins is not in it, and the others would wait for ever for who has left. "
                "backward() sums gradients by itself; write run.mean(x) for a metric, run.barrier() for a barrier, and "
                "leave init_process_group out",
                Exit.DATA,
            )
        if self._first:
            self._check_hooks()
        weights, state = self._looks.behind() if void else (False, False)
        if void and (weights or self.wrote() or _version(self._frozen) != self._frozen_versions):
            raise FallowError(
                f"a body that is not the step's last one on this member has changed weights, {_ONCE_PER_SHARD}",
                Exit.DATA,
            )
        if state:
            raise FallowError(
                "a body that is not the step's last one on this member has changed an optimizer's state behind its "
                "backward, before the step that this backward is a part of: write `if run.final_shard:` before that, "
                "or do it between two run.steps loops",
                Exit.DATA,
            )
        if not (void or trained) and self.wrote():
            raise FallowError(
                "a body has changed weights by hand without a backward: what it knows is one shard, another one on "
                "each member, so their weights would come apart; make gradients with backward() and leave the weights "
                "to prepared optimizers, or change them behind the backward, or between two run.steps loops",
                Exit.DATA,
            )
        if void:
            rates = self._rates()
            if self._rates_before is not None and rates != self._rates_before:
                raise FallowError(
                    "an optimizer's learning rate or another option changes with each body, once per shard: "
                    "compute it from run.step, use a prepared scheduler, or write `if run.final_shard:` before it",
                    Exit.DATA,
                )
            self._rates_before = rates
        if trained:
            self._check_calls(void=void)
        if any(parameter.requires_grad for parameter in self._frozen):
            raise FallowError(
                "a parameter that was frozen when it was prepared has requires_grad=True now, and its gradient would "
                "not be shared: leave requires_grad on until after run.prepare, and freeze it then",
                Exit.DATA,
            )
        if void:
            self._prepared.modes.undo()

    def _check_calls(self, *, void: bool) -> None:
        """Bodies of one step call the same objects. Only the final one has gradients by which to decide otherwise."""
        calls, before = self._gate.calls, self._calls_before
        if void:
            self._calls_before = calls
        if before is None or calls == before or (not void and (calls < before or calls > before)):
            return
        raise FallowError(
            "the bodies of one step call different optimizers, schedulers or averages to act, so what happens depends "
            "on which body is a member's last one: go by run.step and not by a count of bodies (enumerate), by "
            "run.mean(loss) under `if run.final_shard:` and not by one shard's loss; leave gathering gradients over "
            "bodies out, for global_batch of run.prepare does that",
            Exit.DATA,
        )

    def others(self) -> int:
        """A checksum of the prepared objects that are neither modules nor optimizers.

        Raises:
            FallowError: the state of one cannot be handed over.
        """
        total = 0
        for number, thing in enumerate(self._prepared.others):
            encoded, tensors = encode(thing.state_dict(), f"other.{number} ({type(thing).__name__})")
            total = zlib.crc32(encoded.tree, total)
            for tensor in tensors:
                total = zlib.crc32(as_bytes(tensor).numpy().data, total)
        return total

    def check_others(self, before: int) -> None:
        """After a body in which nothing acts: refuse objects whose state has changed all the same."""
        if self.others() != before:
            raise FallowError(
                "a prepared object changes its state by other calls than step, update or update_parameters, so it "
                "would change once per shard: write `if run.final_shard:` first, or do not prepare the object",
                Exit.DATA,
            )

    def _rates(self) -> tuple[Any, ...]:
        """Sizes and plain options of all optimizers' groups."""
        groups = [group for optimizer in self._prepared.optimizers for group in optimizer.param_groups]
        found: list[Any] = [len(group["params"]) for group in groups]
        for group in groups:
            found += [value for value in group.values() if _is_plain(value)]
            found += [value.item() for value in group.values() if _is_number(value)]
        return tuple(found)


class _NoForward:
    """Forward hook: after an acting step of the same body, a forward that is to be trained on is refused.

    A class, so that a module with it can be pickled and copied; there the hook does nothing.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.gate.stepped and torch.is_grad_enabled():
            raise self.gate.refuse(
                "a forward after an optimizer's step in the same body would see other weights on a member with one "
                "shard than on one with several; put each part with a step of its own under `if run.phase(name):`, or "
                "write one run.steps loop per phase; for an evaluation use torch.no_grad()"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()


def _version(parameters: list[nn.Parameter]) -> int:
    """Changes when one of them is written to."""
    return sum(map(_its_version, parameters))


def _checksum(tensor: torch.Tensor) -> int:
    """Of its beginning; 32 bits."""
    return zlib.crc32(as_bytes(tensor.detach().reshape(-1)[:_CANARY].to("cpu").contiguous()).numpy().data)


def _own_collectives() -> int:
    """How many collectives this process has begun over process groups that the script made."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    total = 0
    with contextlib.suppress(AttributeError):  # a torch that keeps its groups elsewhere
        groups: list[Any] = list(distributed.distributed_c10d._world.pg_map)
        for group in groups:
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                total += group._get_sequence_number_for_group()
    return total


def _idle() -> _NoForward:
    return _NoForward(Gate())


def _drives(thing: Any, optimizer: torch.optim.Optimizer) -> bool:
    """True if a prepared object is a scheduler of the optimizer, or has one in an attribute."""
    inside = list(getattr(thing, "__dict__", {}).values())
    inside += [item for value in inside if isinstance(value, list | tuple) for item in value]
    return any(getattr(owner, "optimizer", None) is optimizer for owner in (thing, *inside))


def _is_number(value: Any) -> bool:
    """A learning rate in a tensor, where it can be read without waiting for an accelerator."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _is_plain(value: Any) -> bool:
    return type(value) in (float, int, bool) or (type(value) is tuple and all(type(part) is float for part in value))
