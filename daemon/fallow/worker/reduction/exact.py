"""Sums of gradients that do not depend on who computed which shard: integers under power-of-two scales."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fallow.model import Exit, FallowError
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buckets import Arrived, Bucket, Sum
from fallow.worker.reduction.integers import Converter, add_truncated
from fallow.worker.reduction.scales import NOTHING, Scales, exponent
from fallow.worker.transport.device import asynchronous, to_host
from fallow.worker.transport.group import Group


class Exact(Arithmetic):
    """Sums in int64, which do not depend on order or grouping.

    The gradient g of shard i, with the weight w = n_i / N, is added as the integer trunc(w x g x 2^s) under the
    parameter's scale, see `Scales`. With P, the largest number of gradients that one shard gives for the parameter
    (more than 1 for several backwards in a body) rounded up to a power of two, and G, the largest magnitude among
    all shards' gradients of the parameter:

        |result - sum(w_i g_i)|  <=  n U + 2^-52 sum|w_i g_i| + half a unit in the last place of the parameter's type,
        U <= 2^-47 P G  (2^-55 P G while G stays what it was)

    for n gradients. Summation in float32 may err by n 2^-24 sum|w_i g_i|. So this is at least as accurate for all
    elements with sum|w_i g_i| >= 2^-22 P G (2^-30 P G while G stays), and by far more accurate for the large ones. For
    float64 parameters the same bound says: as accurate as a float64 sum in the parameter's largest elements while G
    stays, up to 2^8 times worse in a step in which it has fallen by 2^8; in the others the error is as small in
    absolute terms only.

    A sum whose gradients left the range of their scales is void, and all members make it again with scales that fit
    (most often in the first step, where references are guesses).

    While each member computes one shard, its gradients travel as they are, in half the bytes, and become integers where
    they are added up: the same integers.

    A parameter for which some shard had an infinity or a NaN gets NaN in every element, on all members, so that
    GradScaler skips the step; its scale stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scales = Scales()
        self._results: dict[int, Sum] = {}
        "gradients by bucket, in the parameters' type and padded to equal pieces"
        self._scattered: dict[int, _Scattered] = {}
        "by bucket, for the group of the last sum"
        self._main_sums: dict[int, _Scattered] = {}
        "by bucket, the sums of this attempt to which late ones are added"
        self._launched: list[tuple[Bucket, _Scattered]] = []
        "sums of this round"
        self._peaks: list[tuple[int, list[int], torch.Tensor]] = []
        "body, parameters' indices, and one or several largest magnitudes of each"
        self._host_peaks: torch.Tensor | None = None
        "all of them in a row, on their way to the host"
        self._gradient_counts: list[defaultdict[int, int]] = []
        "by body, the number of gradients by parameter's index"
        self._single_shard_weights: Sequence[float] = ()
        "by rank, weights of gradients that travel as they are; empty: integers do"
        self._split_phases: set[str] = set()
        "phases in which a shard gives a parameter several gradients, so that there is no one as it is"
        self._is_split = False
        "one did in this attempt, here"
        self._was_split = False
        "one did on some member in an earlier attempt at this sum"

    @property
    def repeated(self) -> int:
        """Finished sums that were made again because a scale did not fit."""
        return self._scales.repeated

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Use this layout from now on. Raises FallowError for complex parameters."""
        for bucket in buckets:
            if not bucket.dtype.is_floating_point:
                raise FallowError(
                    f"a parameter is of type {str(bucket.dtype).removeprefix('torch.')}; reproducible=True takes real "
                    "numbers: hold it as a real parameter and use torch.view_as_complex in forward",
                    Exit.DATA,
                )
        super().lay_out(buckets)
        self._count = sum(len(bucket.members) for bucket in buckets)
        if buckets:
            self._converter = Converter(buckets[0].params[0].device)

    def renew(self) -> None:
        super().renew()
        self._results, self._scattered = {}, {}

    def begin(self, phase: str, single_shard_weights: Sequence[float] = ()) -> None:
        self._phase, self._is_split = phase, False
        self._single_shard_weights = () if self._was_split or phase in self._split_phases else single_shard_weights
        super().begin(phase)
        self._scales.begin(phase)
        self._main_sums, self._launched = {}, []
        self._peaks, self._host_peaks, self._gradient_counts = [], None, []

    def begin_body(self) -> None:
        self._gradient_counts.append(defaultdict(int))

    def _dtype(self, bucket: Bucket) -> torch.dtype:
        return bucket.dtype if self._single_shard_weights else torch.int64

    def add(self, bucket: Bucket, arrived: Arrived, weight: float, *, late: bool) -> None:
        """Add trunc(weight x gradient x scale), or keep the gradient as it is."""
        arrived = [(place, grad) for place, grad in arrived if grad.numel()]
        if self._single_shard_weights:
            self._copy_raw(bucket, arrived, late=late)
            return
        total = self._sum(bucket, late=late)
        counts, small, elements = self._gradient_counts[-1], dict[int, torch.Tensor](), 0
        for place, grad in arrived:
            counts[bucket.members[place]] += 1
            if grad.numel() >= self._converter.small:
                self._add_large(bucket, total, place, grad, weight)
                continue
            if place in small or elements >= self._converter.chunk:
                self._add_small(bucket, total, small, weight)
                small, elements = {}, 0
            small[place] = grad
            elements += grad.numel()
        if small:
            self._add_small(bucket, total, small, weight)

    def _copy_raw(self, bucket: Bucket, arrived: Arrived, *, late: bool) -> None:
        """A late gradient counts as one that came in parts: it is rare, and the next attempt adds integers."""
        total, grads = self._sum(bucket, late=late), dict(arrived)
        if late or len(grads) < len(arrived) or any(total.filled[place] for place in grads):
            self._is_split = True
            return
        views = [total.views[place] for place in grads]
        torch._foreach_copy_(views, list(grads.values()))
        indices = [bucket.members[place] for place in grads]
        small = [n for n, view in enumerate(views) if view.numel() < self._converter.small]
        if small:
            norms = torch._foreach_norm([views[n] for n in small], math.inf)
            self._peaks.append((0, [indices[n] for n in small], torch.stack(norms)))
        for index, view in zip(indices, views, strict=True):
            if view.numel() >= self._converter.small:
                self._peaks.append((0, [index] * 2, torch.stack(torch.aminmax(view))))
        for place, index in zip(grads, indices, strict=True):
            total.filled[place] = True
            self._gradient_counts[0][index] = 1

    def _add_large(self, bucket: Bucket, total: Sum, place: int, grad: torch.Tensor, weight: float) -> None:
        index, view = bucket.members[place], total.views[place]
        first = not total.filled[place] and bucket.offsets[place] >= bucket.batched
        peaks = self._converter.add_large(
            _in_order(grad, view), weight, self._scales.shift(index), _in_order(view, view), first=first
        )
        total.filled[place] = True
        self._peaks.append((len(self._gradient_counts) - 1, [index] * len(peaks), peaks))

    def _add_small(self, bucket: Bucket, total: Sum, small: dict[int, torch.Tensor], weight: float) -> None:
        indices = [bucket.members[place] for place in small]
        shifts = [self._scales.shift(index) for index in indices]
        places = [total.views[place] for place in small]
        peaks = self._converter.add_small(list(small.values()), weight, shifts, places)
        self._peaks.append((len(self._gradient_counts) - 1, indices, peaks))
        for place in small:
            total.filled[place] = True

    def launch(self, group: Group, bucket: Bucket, *, late: bool) -> None:
        """In pieces: a member turns one of them into gradients, not all of the sum."""
        total, scattered = self._sum(bucket, late=late), self._scattered.get(bucket.number)
        total.complete()
        if scattered is None or scattered.flat is not total.flat or scattered.group is not group:
            scattered = _Scattered(total.flat, group)
        if not late:
            self._scattered[bucket.number] = scattered
        scattered.scatter()
        self._launched.append((bucket, scattered))

    def conclude(self, group: Group) -> None:
        """Turn this member's pieces into gradients, and launch that all get all pieces."""
        if self._launched and asynchronous(group.device):
            group.stream_waits()
        elif self._launched:
            group.wait_and_verify()
        for bucket, scattered in self._launched:
            group.collect(self._gradients_of_piece(bucket, scattered))
        self._launched = []
        if self._peaks:
            self._host_peaks = to_host(torch.cat([peaks.double() for _, _, peaks in self._peaks]))

    def _gradients_of_piece(self, bucket: Bucket, scattered: _Scattered) -> torch.Tensor:
        """Add the contributions to this member's piece of the main sum, and make gradients of it, by chunks."""
        main = self._main_sums.setdefault(bucket.number, scattered)
        whole = self._result_memory(bucket, first=scattered is main, members=scattered.group.size)
        bounds = [*bucket.offsets, bucket.numel]
        for start in range(main.start, main.stop, self._converter.chunk):
            stop = min(start + self._converter.chunk, main.stop)
            # The parameters in this chunk, each with its own scale.
            places = range(bisect_right(bucket.offsets, start) - 1, bisect_left(bucket.offsets, stop))
            parts = [slice(max(0, bounds[n] - start), min(stop, bounds[n + 1]) - start) for n in places]
            shifts = [self._scales.shift(bucket.members[n]) for n in places]
            rows = main.contributions(start, stop)
            if self._single_shard_weights:
                total = self._converter.sum_rows(rows, self._single_shard_weights, parts, shifts)
            else:
                total = rows[scattered.group.rank]
                for row in rows if scattered is main else scattered.contributions(start, stop):
                    if row is not total:
                        add_truncated(total, row)
            self._converter.back(total, parts, shifts, whole[start:stop])
        return whole

    def _result_memory(self, bucket: Bucket, *, first: bool, members: int) -> torch.Tensor:
        """Memory for the gradients of all pieces, in the parameters' type and padded to equal pieces."""
        numel = members * _piece_length(bucket.numel, members)
        known = self._results.get(bucket.number)
        if known is None or len(known.flat) != numel or (first and known.shared):
            self._results[bucket.number] = known = Sum(bucket, bucket.dtype, numel)
        return known.flat

    def results(self, bucket: Bucket) -> list[torch.Tensor]:
        views = self._results[bucket.number].views
        for index, view in zip(bucket.members, views, strict=True):
            if index in self._scales.not_finite:
                view.fill_(torch.nan)
        return [view.detach() for view in views]

    def extents(self) -> list[int]:
        """By parameter's index, the exponent of what one of this member's shards gives at most."""
        places = [(body, index) for body, indices, _ in self._peaks for index in indices]
        # `max` may drop a NaN, and an infinity counts alike.
        values = [] if self._host_peaks is None else self._host_peaks.abs().nan_to_num(math.inf, math.inf).tolist()
        largest: defaultdict[tuple[int, int], float] = defaultdict(float)
        for place, value in zip(places, values, strict=True):
            largest[place] = max(largest[place], value)
        found = [NOTHING] * self._count
        for (body, index), value in largest.items():  # by shard: the members' maximum must not depend on who has which
            found[index] = max(found[index], exponent(value, self._gradient_counts[body][index]))
        return [*found, int(self._is_split)]

    def judge(self, extents: Sequence[int]) -> bool:
        *exponents, is_split = extents
        self._was_split = self._was_split or bool(is_split)
        if not self._scales.judge(exponents, is_void=bool(is_split)):
            return False
        # Not before: where the group breaks, some members may have heard of a void attempt and others not.
        if self._was_split:
            self._split_phases.add(self._phase)
        self._was_split = False
        return True

    def forget(self) -> None:
        self._was_split = False
        self._scales.forget()

    def export(self) -> dict[str, Any]:
        """The scales, and what travels how."""
        return {"scales": self._scales.export(), "split_phases": sorted(self._split_phases)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._was_split = False
        self._scales.load(state["scales"])
        self._split_phases = set(state["split_phases"])


def _in_order(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, flat, as those of `place` lie in memory; a view if both lie alike."""
    if place.is_contiguous():
        return tensor.reshape(-1)
    if tensor.stride() != place.stride():
        tensor = torch.empty_like(place, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class _Scattered:
    """The sum over one bucket in one group, in two halves: each makes its piece of the result, then all get all pieces.

    So what the sum is turned into is worked out once in the group instead of once by each member, and the second half
    moves that, not the sum. In gloo reduce-scatter is an all-reduce; hence the exchange.
    """

    def __init__(self, flat: torch.Tensor, group: Group) -> None:
        self.flat = flat
        "this member's contributions"
        self.group = group
        each, numel = _piece_length(flat.numel(), group.size), flat.numel()
        self._sent_counts = [max(0, min(each, numel - rank * each)) for rank in range(group.size)]
        self.start = min(numel, group.rank * each)
        self.stop = self.start + self._sent_counts[group.rank]
        "of this member's piece, in elements"
        self._received_counts = [self.stop - self.start] * group.size
        # What is sent must lie in one: from the middle this member's own piece goes with it, to itself.
        self._sent = slice(None)
        if group.rank in (0, group.size - 1):
            self._sent = slice(self.stop, None) if group.rank == 0 else slice(self.start)
            self._sent_counts[group.rank] = self._received_counts[group.rank] = 0
        self._received = flat.new_empty(sum(self._received_counts))
        self._rows = torch.split(self._received, self._received_counts)

    def scatter(self) -> None:
        """Launch the first half: this member's piece of all others comes here."""
        self.group.exchange(self.flat[self._sent], self._sent_counts, self._received, self._received_counts)

    def contributions(self, start: int, stop: int) -> list[torch.Tensor]:
        """By rank, what each has for these elements of this piece, once the first half is complete; to be used up."""
        rows = [row[start - self.start : stop - self.start] for row in self._rows]
        rows[self.group.rank] = self.flat[start:stop]
        return rows


def _piece_length(numel: int, size: int) -> int:
    """Elements in each member's piece of a bucket, the last one padded."""
    return -(-numel // size)
