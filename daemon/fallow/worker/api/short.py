"""The short loop, `run.steps`, on top of the two-level loop `run.updates`: one body per shard.

A gate lets prepared objects act only after the backward of the step's last shard.
"""

import copyreg
from collections.abc import Callable, Generator, Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from fallow.model import Exit, FallowError
from fallow.worker.loop.update import Update
from fallow.worker.loop.updates import Loop

_TWO_LEVELS = (
    "use the loop in two levels, `for update in run.updates(loader):` with `for batch in update:` in it, and behind "
    "that what happens once per step"
)


def steps(loop: Loop, gate: "Gate", updates: Generator[Update, None, None]) -> Iterator[Any]:
    """Iterate over the batches of this member's shards.

    Each body has one backward, followed by calls of prepared objects: `opt.step()`, `opt.zero_grad()`, schedulers,
    scalers and averages. These calls act only in this member's last body of a step, once all members have the sums.

    Raises:
        FallowError: a body needs the two-level loop.
    """
    gate.guard(loop.member.prepared.acting_objects())

    def behind_backward() -> None:
        if gate.backward:
            raise FallowError(
                "a second backward in the body of a run.steps loop (torch.utils.checkpoint makes some, if it is not "
                f"called with use_reentrant=False): {_TWO_LEVELS}",
                Exit.DATA,
            )
        gate.backward = True
        shards = loop.update.inner_loop if loop.update is not None else None
        if shards is not None:
            gate.open = shards.complete()

    reduction = loop.member.reduction
    reduction.after_backward, loop.is_short_loop = behind_backward, True
    try:
        for update in updates:
            for batch in update:
                gate.open = gate.backward = False
                yield batch
                if not gate.backward:
                    raise FallowError(
                        f"step {update.step}: a body of a run.steps loop made no backward: to leave a batch out, "
                        f"{_TWO_LEVELS}",
                        Exit.DATA,
                    )
            gate.open = gate.backward = True
    finally:
        gate.open = gate.backward = True
        reduction.after_backward, loop.is_short_loop = (lambda: None), False
        updates.close()


class Gate:
    """Decides whether calls of prepared objects act. Open outside of the short loop, and after complete gradients."""

    def __init__(self) -> None:
        self.open = True
        self.backward = True
        "True once the current body has made its backward"
        self._guarded: set[int] = set()

    def guard(self, acting: Sequence[tuple[Any, Sequence[str]]]) -> None:
        """Make these methods of these objects check the gate; once for each object."""
        for thing, names in acting:
            if id(thing) in self._guarded:
                continue
            self._guarded.add(id(thing))
            if isinstance(thing, torch.optim.Optimizer):
                # On the instance, where schedulers patch `step`, too. A bound method, since schedulers use __func__.
                plain = thing.step
                gated = self._gated(thing, "step")
                if hasattr(plain, "_wrapped_by_lr_sched"):
                    gated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # otherwise the scheduler wraps again and warns
                setattr(thing, "step", MethodType(gated, thing))  # noqa: B010  # mypy forbids assigning to a method
                continue
            # A subclass, not instance attributes: schedulers' state_dict() returns all attributes of the instance.
            cls = type(thing)
            methods = {name: self._gated(thing, name) for name in names}
            body = {"__slots__": (), "__module__": cls.__module__, "__reduce_ex__": _as_plain(cls), **methods}
            thing.__class__ = type(cls.__name__, (cls,), body)

    def _gated(self, thing: Any, name: str) -> Callable[..., Any]:
        inner = getattr(thing, name)

        def gated(_self: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "step" and isinstance(thing, torch.optim.Optimizer) and (args or kwargs.get("closure")):
                raise FallowError(
                    "an optimizer's step with a closure runs the model again, where the gradients of other shards are "
                    "missing: use the loop in two levels, `for update in run.updates(loader)`",
                    Exit.DATA,
                )
            if self.open:
                return inner(*args, **kwargs)
            if not self.backward:
                raise FallowError(
                    f"{type(thing).__name__}.{name} in front of a body's backward acts in no body of a short loop: "
                    "call it behind the backward, or use the loop in two levels, `for update in run.updates(loader)`",
                    Exit.DATA,
                )
            return None

        return gated


def _as_plain(cls: Any) -> Callable[[Any, Any], Any]:
    """Make copies and pickles of an object have its plain class, whose methods check no gate."""

    def reduce(self: Any, protocol: Any) -> Any:
        recipe = cls.__reduce_ex__(self, protocol)
        if isinstance(recipe, tuple) and recipe[1] == (type(self),):
            # As in older pickle protocols, which accept another class than the object's.
            return (copyreg._reconstructor, (cls, object, None), *recipe[2:])  # type: ignore[attr-defined]
        return recipe

    return reduce
