"""Sums of gradients that do not depend on who computed which shard: integers under power-of-two scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fallow.model import Exit, FallowError
from fallow.worker.reduction.arithmetic import SMALL
from fallow.worker.reduction.buckets import Bucket, Buckets
from fallow.worker.reduction.scattered import Scattered
from fallow.worker.transport.group import Group

BITS = 62
"""A place holds less than 2^BITS in steady use; the bit above it is for a gradient that arrives in two parts."""
GROWTH = 6
"""A gradient may grow by this power of two over its reference before the step is done again with another scale."""
DECLINE = 8
"""It may fall by this power of two below its reference."""

_NOTHING, _NOT_FINITE = -1 << 20, 1 << 20
"""Exponents of a parameter without a nonzero gradient, and of one with an infinity or NaN."""
_LEAST = -940
"""Smaller exponents count as this one, so that scales stay float64 numbers."""
_GUESS = -6
"""Reference of a parameter that had no gradient yet."""
_ATTEMPTS = 8

_CHUNK = 1 << 17
"""Elements converted at a time: the scratch stays in the processor's second-level cache."""
_CHUNK_CUDA = 1 << 23


class Exact:
    """Sums in int64, which do not depend on order or grouping.

    The gradient g of shard i, with the weight w = n_i / N, is added as the integer trunc(w x g x 2^s). The scale 2^s
    belongs to the parameter (and to the phase and the number of the backward in the body); s = 62 - GROWTH - e, where
    the reference exponent e follows the largest magnitude of any shard's gradient, which all members learn with each
    sum: replicated state, equal for every membership. A step whose gradients left the window [e - DECLINE, e + GROWTH]
    is void and done again by all members, with the exponent they have (most often the first step, where references are
    guesses).

    Accuracy, for n shards and G, the largest magnitude among all shards' gradients of the parameter:

        |result - sum(w_i g_i)|  <=  n U + 2^-52 sum|w_i g_i| + half a unit in the last place of the parameter's type,
        U <= 2^-47 G  (2^-55 G while G stays what it was)

    Summation in float32 may err by n 2^-24 sum|w_i g_i|. So this is at least as accurate for all elements with
    sum|w_i g_i| >= 2^-22 G (2^-30 G while G stays), and by far more accurate for the large ones. For float64 parameters
    the same bound says: as accurate as a float64 sum in the parameter's largest elements while G stays, up to 2^8 times
    worse in a step in which it has fallen by 2^DECLINE; in the others the error is as small in absolute terms only.

    While each member computes one shard, the gradients travel as they are, in half the bytes, and become integers where
    they are added up: the same integers.

    A parameter for which some shard had an infinity or a NaN gets NaN in every element, on all members, so that
    GradScaler skips the step; its reference stays.
    """

    linear = False

    def __init__(self) -> None:
        self._reference: dict[tuple[int, int], dict[int, int]] = {}
        "(phase, number of the backward) -> parameter's index -> exponent"
        self._phase = 0
        self._trial: dict[tuple[int, int], int] = {}
        "exponents that this step is tried with, because the reference did not fit"
        self._largest: dict[tuple[int, int], int] = {}
        "exponents of this step's gradients, over all members, in the sums that are complete"
        self._lone: tuple[float, ...] = ()
        "by rank, the weight of the gradients that are added up as they are; empty: integers are"
        self._in_parts: set[int] = set()
        "phases in which a gradient came in parts, so that there is no one as it is"
        self._parts = False
        "one did in this attempt, here"
        self._any_parts = False
        "or on some member, in this or an earlier one"
        self._attempts = 0
        self.repeated = 0
        "finished steps that were done again because a scale did not fit"
        self._clear()
        self._scratch: dict[torch.device, _Room] = {}
        self._number = 0
        self._spoilt: set[int] = set()
        "parameters that are not finite in the sum that was judged last"

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """int64. Raises FallowError for complex gradients."""
        if not dtype.is_floating_point:
            raise FallowError(
                f"a parameter is of type {str(dtype).removeprefix('torch.')}; reproducible=True takes real numbers: "
                "hold it as a real parameter and use torch.view_as_complex in forward",
                Exit.DATA,
            )
        return torch.int64

    def begin_step(self, phase: int, lone: Sequence[float]) -> bool:
        """Start from the references, or, in a repetition, from what the attempt before taught."""
        self._phase = phase
        self._clear()
        self._lone = () if self._any_parts or phase in self._in_parts else tuple(lone)
        return bool(self._lone)

    def _clear(self) -> None:
        self._parts = False
        self._largest = {}
        self._peaks: list[tuple[int, int, tuple[torch.Tensor, ...]]] = []
        self._waiting: list[tuple[int, int, torch.Tensor, torch.Tensor, float, bool]] = []
        self._elements = 0

    def _exponent(self, number: int, index: int) -> int:
        tried = self._trial.get((number, index))
        if tried is not None:
            return tried
        return self._reference.get((self._phase, number), {}).get(index, _GUESS)

    def _shift(self, number: int, index: int) -> int:
        return BITS - GROWTH - self._exponent(number, index)

    # ------------------------------------------------------------------------------------------------- adding

    def add(
        self, number: int, index: int, place: torch.Tensor, grad: torch.Tensor, weight: float, *, first: bool
    ) -> None:
        """Add trunc(weight x grad x scale), or keep the gradient as it is; a weight of 0 leaves no trace."""
        if not weight or not grad.numel():
            if first:
                place.zero_()
            return
        if self._lone and not first:
            self._parts = True
            return
        flat, into = _in_order(grad, place), _in_order(place, place)
        size = flat.numel()
        if size < SMALL:
            self._waiting.append((number, index, into, flat, weight, first))
            self._elements += size
            if self._elements >= _CHUNK:
                self.settle()
            return
        shifts = [] if self._lone else [self._shift(number, index)]
        room = self._room(flat.device)
        for start in range(0, size, room.chunk):
            part = flat[start : start + room.chunk]
            target = into[start : start + part.numel()]
            if self._lone:
                # First: a copy reads memory faster than the search, which finds it in the cache then.
                part = target.copy_(part)
            self._peaks.append((number, index, torch.aminmax(part)))
            if self._lone:
                continue
            if first:
                room.whole(part, weight, [slice(None)], shifts, target)
            else:
                target.add_(room.whole(part, weight, [slice(None)], shifts, room.integers[: part.numel()]))

    def settle(self) -> None:
        """Convert the small gradients that wait, all at once."""
        waiting, self._waiting, self._elements = self._waiting, [], 0
        devices = {flat.device for _, _, _, flat, _, _ in waiting}
        for device in devices:
            self._convert([entry for entry in waiting if entry[3].device == device], device)

    def _convert(self, waiting: list[tuple[int, int, torch.Tensor, torch.Tensor, float, bool]], device: Any) -> None:
        room = self._room(device)
        wide, whole, used = [], [], 0
        for _, _, _, flat, _, _ in waiting:
            wide.append(room.floats[used : used + flat.numel()])
            whole.append(room.integers[used : used + flat.numel()])
            used += flat.numel()
        torch._foreach_copy_(wide, [entry[3] for entry in waiting])
        norms = torch._foreach_norm(wide, math.inf)
        for (number, index, *_), norm in zip(waiting, norms, strict=True):
            self._peaks.append((number, index, (norm,)))
        if self._lone:
            torch._foreach_copy_([entry[2] for entry in waiting], [entry[3] for entry in waiting])
            return
        torch._foreach_mul_(wide, [entry[4] * 2.0 ** self._shift(entry[0], entry[1]) for entry in waiting])
        torch._foreach_copy_(whole, wide)
        fresh = [(entry[2], part) for entry, part in zip(waiting, whole, strict=True) if entry[5]]
        more = [(entry[2], part) for entry, part in zip(waiting, whole, strict=True) if not entry[5]]
        # In this order: a parameter may be in both.
        if fresh:
            torch._foreach_copy_([place for place, _ in fresh], [part for _, part in fresh])
        for place, part in more:
            place.add_(part)

    def _room(self, device: torch.device) -> _Room:
        if device not in self._scratch:
            self._scratch[device] = _Room(device)
        return self._scratch[device]

    # ------------------------------------------------------------------------------------------------- judging

    def extent(self, number: int, count: int) -> list[int]:
        """Exponents of this member's largest gradients in the sum of that number; whether one came in parts."""
        self.settle()
        mine = [entry for entry in self._peaks if entry[0] == number]
        self._peaks = [entry for entry in self._peaks if entry[0] != number]
        found = [_NOTHING] * count
        values = _values([tensor for _, _, tensors in mine for tensor in tensors])
        for _, index, tensors in mine:
            for _ in tensors:
                found[index] = max(found[index], _exponent_of(next(values)))
        return [*found, int(self._parts)]

    def judge(self, number: int, extent: Sequence[int]) -> bool:
        """Compare what there was with what the scales are made for."""
        *exponents, parts = extent
        good = not parts
        self._any_parts = self._any_parts or bool(parts)
        self._number, self._spoilt = number, set()
        for index, found in enumerate(exponents):
            if found == _NOTHING:
                continue
            if found == _NOT_FINITE:
                self._spoilt.add(index)
                continue
            used = self._exponent(number, index)
            self._largest[number, index] = found
            if not used - DECLINE <= found <= used + GROWTH:
                good = False
                self._trial[number, index] = found
        if not good:
            self._attempts += 1
            if self._attempts > _ATTEMPTS:
                raise FallowError(
                    f"the scale of a gradient did not settle in {_ATTEMPTS} attempts at one step: the same shard gave "
                    "other gradients each time; with reproducible=True a body must depend on its batch, the state "
                    "and torch's, numpy's and random's own generators only",
                    Exit.DATA,
                )
        return good

    # ------------------------------------------------------------------------------------------------- results

    def reduce(self, group: Group, bucket: Bucket) -> None:
        """In pieces: a member turns one of them into gradients, not all of the sum."""
        flat = bucket.plain if self._lone else bucket.flat
        known = bucket.scattered
        if known is None or not known.serves(group, flat):
            # What travels as it is makes way for the result, chunk by chunk: memory that no cache holds costs most.
            whole = flat if self._lone else _apart(bucket)
            bucket.scattered = known = Scattered(flat, whole, group)
        known.scatter()

    def results(self, group: Group, buckets: Buckets, touched: Sequence[bool]) -> dict[int, torch.Tensor]:
        """Gradients from the sum that was judged last."""
        used = [bucket for bucket in buckets.all if any(touched[index] for index in bucket.members)]
        found: dict[int, torch.Tensor] = {}
        for bucket in used:
            scattered = bucket.scattered
            assert scattered is not None
            self._turn(bucket, scattered)
            scattered.gather()
            found |= buckets.parts(bucket, scattered.whole)
        group.wait()
        for index in self._spoilt:
            found[index].fill_(math.nan)
        return {index: grad for index, grad in found.items() if touched[index]}

    def _turn(self, bucket: Bucket, scattered: Scattered) -> None:
        """Make gradients of this member's piece of the sum, a chunk at a time."""
        room = self._room(bucket.flat.device)
        position = 0
        for start in range(scattered.start, scattered.stop, room.chunk):
            stop = min(start + room.chunk, scattered.stop)
            # The parameters in this chunk, each with its own scale.
            parts, shifts = [], []
            while position < len(bucket.members):
                offset = bucket.offsets[position]
                end = bucket.offsets[position + 1] if position + 1 < len(bucket.offsets) else bucket.flat.numel()
                first, last = max(offset, start), min(end, stop)
                if first < last:
                    parts.append(slice(first - start, last - start))
                    shifts.append(self._shift(self._number, bucket.members[position]))
                if end > stop:
                    break
                position += 1
            contributions, into = scattered.contributions(start, stop), scattered.whole[start:stop]
            if not self._lone:
                total, *others = contributions
                for other in others:
                    total.add_(other)
                room.back(total, parts, shifts, into)
                continue
            weighted = [(weight, one) for weight, one in zip(self._lone, contributions, strict=True) if weight]
            if len(weighted) <= 2 and _exact_in_singles([weight for weight, _ in weighted], shifts, into.dtype):
                room.singles(weighted, parts, shifts, into)
            else:
                room.back(room.total(weighted, parts, shifts), parts, shifts, into)

    # ------------------------------------------------------------------------------------------------- state

    def end_step(self) -> None:
        """Let the references follow: up at once, down by one power of two per step unless the step was repeated."""
        for (number, index), found in self._largest.items():
            references = self._reference.setdefault((self._phase, number), {})
            known = references.get(index)
            fits = known is not None and (number, index) not in self._trial
            references[index] = max(found, (known or 0) - 1) if fits else found
        if self._any_parts:
            self._in_parts.add(self._phase)
        self.repeated += bool(self._attempts)
        self.forget()

    def forget(self) -> None:
        """Back to the references of the last finished step."""
        self._trial = {}
        self._any_parts = False
        self._attempts = 0
        self._clear()

    def export(self) -> dict[str, Any]:
        """References in order."""
        return {
            "references": [[*key, sorted(known.items())] for key, known in sorted(self._reference.items())],
            "in_parts": sorted(self._in_parts),
            "repeated": self.repeated,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over an exported state."""
        self.forget()
        self._reference = {(phase, number): dict(known) for phase, number, known in state["references"]}
        self._in_parts = set(state["in_parts"])
        self.repeated = int(state["repeated"])


class _Room:
    """Memory to convert a chunk in, and how that is done."""

    def __init__(self, device: torch.device) -> None:
        self.chunk = _CHUNK if device.type == "cpu" else _CHUNK_CUDA
        "elements at a time"
        size = self.chunk + SMALL  # the small ones may exceed it by less than one of them
        self.floats = torch.empty(size, dtype=torch.float64, device=device)
        self._singles = torch.empty(size, dtype=torch.float32, device=device)
        self.integers = torch.empty(size, dtype=torch.int64, device=device)
        self._more = torch.empty(size, dtype=torch.int64, device=device)

    def whole(
        self, numbers: torch.Tensor, weight: float, parts: list[slice], shifts: list[int], into: torch.Tensor
    ) -> torch.Tensor:
        """trunc(weight x number x 2^shift), with a shift for each part; returns `into`."""
        factors = [weight * 2.0**shift for shift in shifts]
        # Where a float32 holds each product, too, it is as exact as in float64.
        single = numbers.dtype != torch.float64 and all(_single(weight, factor) for factor in factors)
        scaled = (self._singles if single else self.floats)[: numbers.numel()]
        return into.copy_(_scaled(numbers, parts, factors, scaled))

    def total(self, weighted: list[tuple[float, torch.Tensor]], parts: list[slice], shifts: list[int]) -> torch.Tensor:
        """The sum of the `whole` ones, in integers."""
        size = weighted[0][1].numel()
        total = self.integers[:size]
        for turn, (weight, one) in enumerate(weighted):
            whole = self.whole(one, weight, parts, shifts, self._more[:size] if turn else total)
            if turn:
                total.add_(whole)
        return total

    def singles(
        self, weighted: list[tuple[float, torch.Tensor]], parts: list[slice], shifts: list[int], into: torch.Tensor
    ) -> None:
        """`back` of the `total` of one or two, where `_exact_in_singles` says so: in less than half the time.

        These integers are float32 numbers, and the sum of two is rounded as the integer would be: once.
        """
        size = into.numel()
        rooms = [self._singles[:size], self.floats.view(torch.float32)[:size]]
        total, *more = [
            _scaled(one, parts, [weight * 2.0**shift for shift in shifts], room).trunc_()
            for (weight, one), room in zip(weighted, rooms, strict=False)
        ]
        for other in more:
            total.add_(other)
        total.add_(0.0)  # there is no integer -0
        _scaled(total, parts, [2.0**-shift for shift in shifts], into)

    def back(self, total: torch.Tensor, parts: list[slice], shifts: list[int], into: torch.Tensor) -> None:
        """total x 2^-shift, rounded once."""
        if all(_direct(into.dtype, shift) for shift in shifts):
            into.copy_(total)
            torch._foreach_mul_([into[part] for part in parts], [2.0**-shift for shift in shifts])
            return
        # Each as if it were alone: the bits must not depend on where chunks and pieces end.
        for part, shift in zip(parts, shifts, strict=True):
            if _direct(into.dtype, shift):
                into[part].copy_(total[part]).mul_(2.0**-shift)
            else:
                wide = self.floats[: part.stop - part.start]
                into[part].copy_(wide.copy_(total[part]).mul_(2.0**-shift))


def _scaled(numbers: torch.Tensor, parts: list[slice], factors: list[float], into: torch.Tensor) -> torch.Tensor:
    """number x factor, with a factor for each part, in the type of `into`; returns that."""
    if len(parts) == 1 and numbers.dtype == into.dtype:
        return torch.mul(numbers, factors[0], out=into)
    into.copy_(numbers)
    torch._foreach_mul_([into[part] for part in parts], factors)
    return into


def _apart(bucket: Bucket) -> torch.Tensor:
    """Memory for the gradients that the bucket's sums are turned into; that of the group before, if it had some."""
    known = bucket.scattered
    if known is not None and known.whole.data_ptr() != bucket.flat.data_ptr():
        return known.whole
    return torch.empty_like(bucket.plain)


def _in_order(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, flat, as those of `place` lie in memory; a view if both lie alike."""
    if place.is_contiguous():
        return tensor.reshape(-1)
    if tensor.stride() != place.stride():
        tensor = torch.empty_like(place, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _values(tensors: Sequence[torch.Tensor]) -> Any:
    """The tensors' single numbers; one transfer, if they are not in this processor's memory."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return iter([float(tensor) for tensor in tensors])
    return iter(torch.stack([tensor.double() for tensor in tensors]).tolist())


def _exponent_of(value: float) -> int:
    """The least e with |value| < 2^e, at least `_LEAST`."""
    if not math.isfinite(value):
        return _NOT_FINITE
    return max(math.frexp(value)[1], _LEAST) if value else _NOTHING


def _single(weight: float, factor: float) -> bool:
    """The product of a float32 and the factor is a float32, unless it vanishes in the integer anyway."""
    return math.frexp(weight)[0] == 0.5 and 2.0**-126 <= factor <= 2.0**127


def _exact_in_singles(weights: Sequence[float], shifts: Sequence[int], dtype: torch.dtype) -> bool:
    """What these make of float32 gradients are float32 numbers, and the way back needs no other type either."""
    return dtype == torch.float32 and all(
        _direct(dtype, shift) and all(_single(weight, weight * 2.0**shift) for weight in weights) for shift in shifts
    )


def _direct(dtype: torch.dtype, shift: int) -> bool:
    """The integer and 2^-shift are both normal numbers of the type, so that one rounding does it."""
    return dtype == torch.float64 or (dtype == torch.float32 and -64 <= shift <= 126)
