"""How gradients are laid out in buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fallow.worker.reduction.buckets import SMALL, Sum, lay_out

MEBI = 1 << 20


def sizes(mebibytes: list[float], dtype: torch.dtype = torch.float32) -> list[float]:
    """Sizes of the buckets in MiB, in the order of their reduction.

    The parameters have these sizes in model order, and their gradients come from the last to the first.
    """
    parameters = [nn.Parameter(torch.empty(int(size * MEBI) // dtype.itemsize, dtype=dtype)) for size in mebibytes]
    found = lay_out(parameters, reversed(range(len(parameters))))
    assert sorted(index for bucket in found for index in bucket.members) == list(range(len(parameters)))
    return [bucket.numel * bucket.dtype.itemsize / MEBI for bucket in found]


@pytest.mark.parametrize(
    ("parameters", "buckets"),
    [
        (100 * [1.0], [1.0, 25.0, 25.0, 25.0, 18.0, 6.0]),
        ([0.25, 0.25], [0.5]),
        (5 * [1.0], [1.0, 4.0]),
        ([64.0, 1.0, 1.0, 1.0], [1.0, 66.0]),
    ],
)
def test_the_first_bucket_is_small_the_last_ones_shrink_and_parameters_stay_whole(
    parameters: list[float], buckets: list[float]
) -> None:
    assert sizes(parameters) == sizes(parameters, torch.bfloat16) == buckets


def test_the_order_in_which_gradients_come_decides_and_the_others_have_buckets_of_their_own() -> None:
    parameters = [nn.Parameter(torch.empty(MEBI // 4)) for _ in range(5)]
    found = lay_out(parameters, [1, 4, 0])
    assert [bucket.members for bucket in found] == [[1], [4, 0], [3], [2]]
    for bucket in found:
        room = Sum(bucket, torch.float32)
        for index, view in zip(bucket.members, room.views, strict=True):
            view.fill_(index)
        assert room.flat.unique_consecutive().tolist() == bucket.members


def test_types_do_not_mix() -> None:
    mixed = [nn.Parameter(torch.empty(8, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float32)]
    assert [bucket.members for bucket in lay_out(mixed, [2, 1, 0])] == [[2, 0], [1]]


def test_small_parameters_lie_together_at_the_front() -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in (3, SMALL, 5, SMALL + 1)]
    (bucket,) = lay_out(parameters, [3, 2, 1, 0])
    assert (bucket.members, bucket.batched) == ([2, 0, 3, 1], 8)
    room = Sum(bucket, torch.float32)
    room.flat.fill_(7)
    room.clear()
    room.filled[3] = True
    room.complete()
    assert [float(view.sum()) for view in room.views] == [0, 0, 0, 7 * SMALL]
