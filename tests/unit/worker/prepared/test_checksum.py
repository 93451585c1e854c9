"""Sums by which members compare what they hold."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fallow.worker.prepared.checksum import fingerprint, row_hashes
from fallow.worker.prepared.state import as_bytes


def test_the_fingerprint_depends_on_order_and_on_where_one_tensor_ends() -> None:
    one = [torch.arange(9.0), torch.zeros(3)]
    assert fingerprint(one) == fingerprint([t.clone() for t in one])
    assert fingerprint([one[1], one[0]]) != fingerprint(one)
    assert fingerprint([torch.arange(8.0), torch.tensor([8.0, 0, 0, 0])]) != fingerprint(one)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert fingerprint([transposed]) == fingerprint([transposed.contiguous()])


@given(st.integers(0, 5000 * 4 - 1), st.integers(0, 7), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_the_fingerprint_sees_a_single_bit_anywhere(at: int, bit: int, dtype: torch.dtype) -> None:
    raw = torch.arange(5000 * 4 // 8, dtype=torch.int64).view(torch.uint8)
    tensors = [torch.zeros(3), raw.clone().view(dtype), torch.zeros((), dtype=torch.bool)]
    before, there = fingerprint(tensors), row_hashes(as_bytes(tensors[1]))
    tensors[1].view(torch.uint8)[at] ^= 1 << bit
    assert fingerprint(tensors) != before
    assert not torch.equal(row_hashes(as_bytes(tensors[1])), there)


WORD = st.integers(0, 1023)
"""64-bit words in two rows of 4 KiB, whose sums are taken one by one."""

EXCHANGED = st.tuples(st.just("exchanged"), st.tuples(WORD, WORD))
SHIFTED = st.tuples(st.just("shifted"), st.lists(st.tuples(WORD, WORD), min_size=1, max_size=6), st.integers(0, 62))
NEGATED = st.tuples(st.just("negated"), st.sets(st.integers(0, 2047), min_size=1, max_size=64))


@example(seed=0, change=("shifted", [(191, 96)] * 3, 58))
@given(st.integers(0, 99), st.one_of(EXCHANGED, SHIFTED, NEGATED))
def test_the_fingerprint_sees_changes_that_could_cancel(seed: int, change: Any) -> None:
    """Words that are exchanged, changes of opposite sign, and weights that are negated.

    The sign of every second float32 is the highest bit of a word: two of them make 2^64, which is nothing.
    """
    before = torch.randn(2048, generator=torch.Generator().manual_seed(seed)).view(torch.int64)
    changed = before.clone()
    match change:
        case "exchanged", (one, other):
            changed[one], changed[other] = before[other], before[one]
        case "shifted", pairs, bit:
            for more, less in pairs:
                changed[more] += 1 << bit
                changed[less] -= 1 << bit
        case "negated", places:
            changed.view(torch.float32)[sorted(places)] *= -1
    is_same = torch.equal(changed, before)
    assert (fingerprint([changed]) == fingerprint([before])) is is_same
    assert torch.equal(row_hashes(as_bytes(changed)), row_hashes(as_bytes(before))) is is_same, "as a device takes it"


def test_the_fingerprint_does_not_depend_on_where_a_tensor_begins() -> None:
    block = torch.randn(4097, generator=torch.Generator().manual_seed(0))
    assert fingerprint([block[1:]]) == fingerprint([block[1:].clone()])
    assert torch.equal(row_hashes(as_bytes(block[1:])), row_hashes(as_bytes(block[1:].clone())))
