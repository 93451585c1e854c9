"""The arithmetic signature, and who is refused because of it."""

from collections.abc import Callable, Iterator

import pytest
import torch

from fallow.core.membership.messages import Contract
from fallow.model import FallowError
from fallow.worker.prepared import signature as sg

CPU = [torch.device("cpu")]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threads, type_ = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(type_)
    torch.set_float32_matmul_precision("highest")


def refusal(members: list[str], newcomer: list[str]) -> str | None:
    one, other = (
        Contract(signature="s", shards=2, global_batch=4, total_steps=1, arithmetic=tuple(lines))
        for lines in (members, newcomer)
    )
    return one.difference(other)


GELU = torch.nn.functional.gelu


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: torch.set_num_threads(2), "it computes with 2 thread(s), the members with 1 thread(s)"),
        (
            lambda: torch.set_float32_matmul_precision("high"),
            "high precision, the members with float32 matrix products of highest",
        ),
        (lambda: torch.set_default_dtype(torch.float64), "default type float64, the members with the default type"),
        (lambda: setattr(sg.F, "gelu", lambda x: GELU(x) * (1 + 2**-23)), "computes with test sums on cpu of digest"),
    ],
)
def test_a_newcomer_with_other_arithmetic_is_told_which(
    change: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sg.F, "gelu", GELU)  # is put back
    torch.set_num_threads(1)
    before, members = torch.get_rng_state(), sg.signature(CPU)
    assert refusal(members, sg.signature(CPU)) is None
    assert torch.equal(torch.get_rng_state(), before)
    change()
    assert said in (refusal(members, sg.signature(CPU)) or "")


def test_cuda_without_repeatable_sums_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(FallowError, match="export it in the batch script"):
        sg.enforce([torch.device("cuda", 0)])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sg.enforce([torch.device("cuda", 0)])
    assert torch.are_deterministic_algorithms_enabled()
