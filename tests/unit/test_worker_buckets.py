"""How gradients are laid out in buckets."""

from __future__ import annotations

import torch

from fallow.worker.reduction.arithmetic import Floating
from fallow.worker.reduction.buckets import Buckets

MEBI = 1 << 20


def _sizes(mebibytes: list[float], dtype: torch.dtype = torch.float32) -> list[float]:
    """Sizes of the buckets in MiB, in the order of their reduction, for parameters of these sizes in model order."""
    parameters = [
        torch.nn.Parameter(torch.empty(int(size * MEBI) // dtype.itemsize, dtype=dtype)) for size in mebibytes
    ]
    laid_out = Buckets(parameters, Floating().sum_dtype)
    laid_out.ensure()
    assert sorted(index for bucket in laid_out.all for index in bucket.members) == list(range(len(parameters)))
    return [bucket.flat.numel() * bucket.flat.element_size() / MEBI for bucket in laid_out.all]


def test_the_first_bucket_is_small_and_the_last_ones_shrink() -> None:
    assert _sizes(100 * [1.0]) == [1.0, 25.0, 25.0, 25.0, 18.0, 6.0]


def test_a_small_model_has_few_buckets() -> None:
    assert _sizes([0.25, 0.25]) == [0.5]
    assert _sizes(5 * [1.0]) == [1.0, 4.0]


def test_a_large_parameter_stays_whole() -> None:
    assert _sizes([64.0, 1.0, 1.0, 1.0]) == [1.0, 66.0]


def test_the_order_in_which_gradients_come_decides_and_the_others_follow() -> None:
    parameters = [torch.nn.Parameter(torch.empty(MEBI // 4)) for _ in range(5)]
    laid_out = Buckets(parameters, Floating().sum_dtype, [1, 4, 0])
    laid_out.ensure()
    assert [bucket.members for bucket in laid_out.all] == [[1], [4, 0, 3, 2]]
    for index, view in enumerate(laid_out.views):
        view.fill_(index)
    assert [bucket.flat.unique_consecutive().tolist() for bucket in laid_out.all] == [[1], [4, 0, 3, 2]]


def test_types_do_not_mix_and_half_precision_counts_its_bytes() -> None:
    assert _sizes(100 * [1.0], torch.bfloat16) == _sizes(100 * [1.0])
    mixed = [torch.nn.Parameter(torch.empty(8, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float32)]
    laid_out = Buckets(mixed, Floating().sum_dtype)
    laid_out.ensure()
    assert [bucket.members for bucket in laid_out.all] == [[2, 0], [1]]
