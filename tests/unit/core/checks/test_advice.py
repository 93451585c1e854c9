"""Scripts that were written for other runtimes are told what to leave out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed

from fallow.model import FallowError
from fallow.worker.api.run import init
from small_training import Script, alone, net


@pytest.fixture
def own_group() -> Iterator[None]:
    """As a script makes one that has found a store of its own."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("own_group")
def test_a_process_group_of_the_scripts_own_must_be_the_same_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of another one would have trained by itself, with no word of it."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "FALLOW_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fallow.worker.api.process.Ending", lambda _: None)
    assert init().size == 1
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(FallowError, match="made this process rank 0 of 2, the environment says 0 of 1: leave init_pro"):
        init()


def test_who_looks_for_a_process_group_is_told_what_to_write_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for lookout in (lambda: distributed.init_process_group("gloo"), distributed.get_rank, distributed.barrier):
        with pytest.raises(ValueError, match=r"rendezvous|not been initialized") as caught:
            lookout()
        assert "run.mean(x)" in alone()._advice(caught.value)
    assert alone()._advice(ValueError("a sample is broken")) == ""


def test_what_scripts_for_other_runtimes_ask_for_is_answered_with_what_to_leave_out() -> None:
    script = Script().prepare()
    for ask, words in (
        (lambda: script.model.module.state_dict(), "no wrapper"),
        (lambda: script.model.no_sync(), "summed once in each step"),
        (lambda: script.loader.sampler.set_epoch(1), "Leave set_epoch out"),
        (lambda: script.loader.set_epoch(1), "Leave set_epoch out"),
        (lambda: script.model.head, ""),
        (lambda: net().module, ""),
    ):
        with pytest.raises(AttributeError) as caught:
            ask()
        advice = script.run._advice(caught.value)
        assert words in advice
        assert bool(words) == bool(advice)
