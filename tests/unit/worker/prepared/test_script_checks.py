"""What would be silently wrong with a changing membership is refused: what `e2e/test_misuse` does not show."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

from fallow.model import Exit, FallowError
from fallow.worker.api.run import init
from small_training import Script, alone


def weights_inside(script: Script, _: Any) -> None:
    with torch.no_grad():
        script.model[0].weight.mul_(0.9)


def half_a_backward(script: Script, batch: Any) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    hidden = script.model[0](batch[0])
    hidden.register_hook(fails)
    with contextlib.suppress(RuntimeError):
        script.model[2](hidden).sum().backward()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (weights_inside, "weights or learning rates were changed inside"),
        (half_a_backward, "a backward raised and the body went on"),
    ],
)
def test_a_reproducible_run_refuses_what_others_do(body: Callable[[Script, Any], object], told: str) -> None:
    script = Script().prepare(reproducible=True)
    with pytest.raises(FallowError, match=told):
        script.train(lambda batch: (script.loss(batch).backward(), body(script, batch)))
    assert script.run.step == 0


@pytest.mark.parametrize("then", ["step", "another loop", "nothing", "barrier"])
def test_an_inner_loop_that_is_left_early(then: str, script: Script) -> None:
    script.prepare()

    def train() -> None:
        for update in script.run.updates(script.loader):
            for batch in update:
                script.loss(batch).backward()
                break
            if then == "step":
                script.optimizer.step()
            if then == "another loop":
                script.inner(update, "more")
            if then == "barrier":
                script.run.barrier()

    with pytest.raises(FallowError, match="inner loop"):
        train()
    assert script.run.step == 0


def test_loops_that_are_read_side_by_side(script: Script) -> None:
    script.prepare()
    with pytest.raises(FallowError, match="an inner loop inside an inner loop"):
        script.train(front=lambda update: zip(update, update, strict=True))


def test_an_exception_on_its_way_out_of_the_loop_is_the_scripts_own(script: Script) -> None:
    script.prepare()

    def train() -> None:
        try:
            script.train(lambda _: 1 / 0)
        finally:
            with contextlib.suppress(FallowError):
                script.run.barrier()

    with pytest.raises(ZeroDivisionError):
        train()


# -- what is prepared, and what becomes of it -------------------------------------------------------------------------


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.mark.parametrize(
    "part",
    [nn.DataParallel(nn.Linear(3, 1)), nn.SyncBatchNorm(3), nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)],
    ids=lambda part: type(part).__name__,
)
def test_wrapped_and_unfinished_modules(part: nn.Module, script: Script) -> None:
    with pytest.raises(FallowError, match=rf"prepare: Sequential\.1 is a {type(part).__name__}: "):
        script.run.prepare(nn.Sequential(nn.Linear(3, 3), part))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8).expand(8)),
        ("meta", lambda: torch.ones(1, device="meta").expand(8)),
        ("expanded", lambda: torch.ones(1).expand(8)),
    ],
)
def test_tensors_that_no_newcomer_could_receive(kind: str, make: Callable[[], torch.Tensor], script: Script) -> None:
    with warnings.catch_warnings(action="ignore"):
        script.model[0].register_buffer("odd", make())
    with pytest.raises(FallowError, match=rf"Sequential\.0\.odd is an? {kind} tensor.*: ") as refused:
        script.prepare()
    assert refused.value.code == Exit.DATA


def test_views_of_each_other_are_left_alone(script: Script) -> None:
    base = torch.zeros(4)
    buffers = {
        "part": base[:2],
        "base": base,
        "row": torch.arange(4).expand(1, -1),
        "overlapping": torch.arange(6.0).as_strided((3, 3), (1, 1)),
    }
    for name, tensor in buffers.items():
        script.model.register_buffer(name, tensor)
    script.prepare().train(behind=lambda _: (script.act(), base.add_(1)))
    assert script.model.part.tolist() == [2.0, 2.0]


def test_a_second_optimizer_of_a_prepared_module_and_one_of_the_scripts_own(script: Script) -> None:
    script.prepare()
    second = torch.optim.Adam(script.model[2].parameters(), lr=0.1)
    other = nn.Linear(2, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    other.weight.grad = torch.ones(1, 2)
    script.train(behind=lambda _: (script.act(), own.step()))
    with pytest.raises(FallowError, match="Adam trains a prepared module"):
        script.train(behind=lambda _: second.step())


def test_a_scheduler_that_was_not_prepared(script: Script) -> None:
    torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    script.prepare()
    with pytest.raises(FallowError, match=r"optimizer 0 \(SGD\) but was not prepared"):
        script.train()


def test_hooks_that_would_see_a_part_of_a_gradient(script: Script) -> None:
    handle = script.model[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.1, 0.1))
    script.prepare()
    with pytest.raises(FallowError, match="register_post_accumulate_grad_hook, which would see a part"):
        script.train()
    handle.remove()
    seen: list[torch.Tensor] = []
    script.model[2].bias.register_hook(seen.append)
    script.train()
    assert (script.run.step, len(seen)) == (2, 8)


def test_what_comes_behind_the_first_loop(script: Script) -> None:
    script.prepare()
    script.train()
    with pytest.raises(FallowError, match=r"before the first run\.updates"):
        script.run.prepare(nn.Linear(2, 2))
    script.model.append(nn.Linear(1, 1))
    with pytest.raises(FallowError, match="other parameters than in the first"):
        script.train()


@pytest.mark.parametrize("where", ["in the loop", "in front of it"])
def test_parameters_of_no_prepared_module_that_an_optimizer_holds(where: str, script: Script) -> None:
    """They were trained by each member for itself."""
    late = {"params": nn.Linear(5, 1).parameters()}
    if where == "in front of it":
        script.optimizer.add_param_group(late)
    script.prepare()

    def behind(update: Any) -> None:
        script.act()
        if update.step == 0:
            script.optimizer.add_param_group(late)

    with pytest.raises(FallowError, match="holds 2 parameters that belong to no prepared module"):
        script.train(behind=behind)
    assert script.run.step == (1 if where == "in the loop" else 0)


@pytest.mark.parametrize("where", ["in the loop", "between two loops"])
def test_what_was_frozen_all_along_cannot_be_thawed(where: str, script: Script) -> None:
    """It has no place in the sums: each member would train it by itself."""
    script.model[0].requires_grad_(False)
    script.prepare()

    def behind(_: Any) -> None:
        script.act()
        if where == "in the loop":
            script.model[0].requires_grad_(True)

    def train() -> None:
        for _ in range(2):
            script.train(behind=behind)
            script.model[0].requires_grad_(True)

    with pytest.raises(FallowError, match=r"model\.0\.0\.weight was frozen when the first .* freeze it behind that"):
        train()
    assert script.run.step == (1 if where == "in the loop" else 2)


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
