"""What people write and what would be silently wrong with a changing membership: refused early, with advice."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.reduction.capture import backward_seen
from fallow.worker.transport.group import Group

torch.set_num_threads(1)


class Script:
    """A model, an optimizer and a loader of three shards per step, two steps per epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.run = Run(None, None, Group(0, 0, 1, None))
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = DataLoader(TensorDataset(torch.randn(12, 3)), 2)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    def train(self, body: Callable[[torch.Tensor], Any], *others: Any, optimizer: bool = True, epochs: int = 1) -> None:
        objects = [self.model, *([self.optimizer] if optimizer else []), *others]
        loader = self.run.prepare(*objects, self.loader, global_batch=6)[-1]
        for (x,) in self.run.steps(loader, epochs=epochs):
            body(x)

    def usual(self, x: torch.Tensor) -> None:
        self.loss(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def script() -> Script:
    return Script()


def test_the_usual_body_is_not_refused(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        for group in script.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + script.run.step)
        script.usual(x)
        script.model.eval()
        with torch.no_grad():  # an evaluation after the step
            script.loss(x)
        script.model.train()
        if script.run.final_shard:
            with torch.no_grad():
                script.model[0].weight.clamp_(-1, 1)

    script.train(body, epochs=3)
    assert script.run.step == 6


@pytest.mark.parametrize("early", [False, True])
def test_weights_that_a_body_changes_before_its_backward_are_not_sent_while_members_compute(
    early: bool, script: Script
) -> None:
    def body(x: torch.Tensor) -> None:
        clip = script.run.final_shard
        if clip and early:
            weights.clamp_(-1, 1)
        script.usual(x)
        if clip and not early:
            weights.clamp_(-1, 1)

    weights = script.model[0].weight.detach()  # of one version counter with the parameter
    script.train(body)
    assert script.run._member.standing.whole is early


@pytest.mark.parametrize("make", [nn.DataParallel, nn.SyncBatchNorm, nn.LazyLinear])
def test_wrapped_and_unfinished_modules(make: Callable[..., nn.Module], script: Script) -> None:
    part = make(nn.Linear(3, 1)) if make is nn.DataParallel else make(3)
    with pytest.raises(FallowError, match=rf"prepare: Sequential\.1 is a {make.__name__}: "):
        script.run.prepare(nn.Sequential(nn.Linear(3, 3), part))


def test_an_optimizer_of_another_module(script: Script) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(FallowError, match="holds 2 parameters that belong to no prepared module"):
        script.train(script.usual, other)


def test_an_optimizer_that_was_not_prepared(script: Script) -> None:
    with pytest.raises(FallowError, match=r"an object \(SGD\) act that was not prepared"):
        script.train(script.usual, optimizer=False)


def test_a_second_optimizer_of_a_prepared_module(script: Script) -> None:
    second = torch.optim.Adam(script.model[2].parameters(), lr=0.1)

    def body(x: torch.Tensor) -> None:
        script.usual(x)
        second.step()

    with pytest.raises(FallowError, match=r"an object \(Adam\) act that was not prepared"):
        script.train(body)


@pytest.mark.parametrize("lasts", [False, True])
def test_an_optimizer_of_something_that_was_not_prepared(lasts: bool, script: Script) -> None:
    """A second model would train on each member by itself; what lives in one body is that body's own affair."""
    other = nn.Linear(3, 3)
    kept = torch.optim.SGD(other.parameters(), lr=0.1)

    def body(x: torch.Tensor) -> None:
        noise = nn.Parameter(torch.zeros_like(x))
        optimizer = kept if lasts else torch.optim.SGD([noise], lr=0.1)
        for _ in range(2):
            noise.grad = torch.ones_like(x)
            optimizer.step()
        script.usual(x + noise.detach())

    refused = pytest.raises(FallowError, match="act that was not prepared") if lasts else contextlib.nullcontext()
    with refused:
        script.train(body)


def test_weights_that_a_script_trains_by_hand(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        script.loss(x).backward()
        with torch.no_grad():
            for parameter in script.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    with pytest.raises(FallowError, match=r"model\.0\.0\.weight was trained, but no prepared optimizer holds it"):
        script.train(body, optimizer=False)


def test_weights_that_no_optimizer_trains_may_have_gradients(script: Script) -> None:
    script.optimizer = torch.optim.SGD(script.model[2].parameters(), lr=0.1)
    script.train(script.usual)


def test_a_scheduler_that_was_not_prepared(script: Script) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    with pytest.raises(FallowError, match=r"optimizer 0 \(SGD\) but was not prepared"):
        script.train(script.usual)
    inside = Script()
    schedule = torch.optim.lr_scheduler.SequentialLR(
        inside.optimizer, [torch.optim.lr_scheduler.StepLR(inside.optimizer, 1) for _ in range(2)], [3]
    )
    inside.train(inside.usual, schedule)


@pytest.mark.parametrize("what", ["average", "scaler", "scaler in the final body"])
def test_an_average_or_a_scaler_that_was_not_prepared(what: str, script: Script) -> None:
    average = torch.optim.swa_utils.AveragedModel(script.model)
    scaler = torch.amp.GradScaler("cpu")

    def body(x: torch.Tensor) -> None:
        if what == "average":
            script.usual(x)
            average.update_parameters(script.model)
        elif script.run.final_shard or what == "scaler":
            scaler.scale(script.loss(x)).backward()
            scaler.step(script.optimizer)

    kind = "AveragedModel" if what == "average" else "GradScaler"
    with pytest.raises(FallowError, match=rf"a body has an object \({kind}\) act that was not prepared"):
        script.train(body)
    average.update_parameters(script.model)  # the script's own, outside of the loop


class Both:
    """An object that has others act, as trainers do."""

    def __init__(self, average: torch.optim.swa_utils.AveragedModel) -> None:
        self.average = average

    def update(self, model: nn.Module) -> None:
        self.average.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


def test_an_average_inside_of_a_prepared_object_and_a_scaler_that_does_nothing(script: Script) -> None:
    both = Both(torch.optim.swa_utils.AveragedModel(script.model))
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def body(x: torch.Tensor) -> None:
        scaler.scale(script.loss(x)).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        both.update(script.model)

    script.train(body, both)
    assert int(both.average.n_averaged) == 2


@pytest.mark.parametrize("tensor", [False, True])
def test_rates_that_change_per_shard(tensor: bool, script: Script) -> None:
    if tensor:
        script.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)

    def body(x: torch.Tensor) -> None:
        script.usual(x)
        script.optimizer.param_groups[0]["lr"] *= 0.9

    with pytest.raises(FallowError, match="changes with each body"):
        script.train(body)


def test_weights_that_change_per_shard(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        gradients = torch.autograd.grad(script.loss(x), list(script.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(script.model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient

    with pytest.raises(FallowError, match=r"changed weights, which would happen once per shard"):
        script.train(body)


def rehearse(script: Script, body: Callable[[torch.Tensor], Any]) -> None:
    """Under a head a process begins with a void body whose results are thrown away."""
    loader = script.run.prepare(script.model, script.optimizer, script.loader, global_batch=6)[-1]
    step = script.run._loop.step
    with backward_seen(step.before_backward, step.after_backward, step.backward_failed):
        step.begin_call()
        for (x,) in step.rehearse(loader):
            body(x)


WEIGHTS = {
    "clipped behind": "step's last one on this member has changed weights, .* `if run.final_shard:` first",
    "clipped before": "",
    "clipped in the final body": "",
    "decay behind": "step's last one on this member has changed weights, ",
    "decay before": "each body changes weights before its backward, which would happen once per shard",
    "decay in the final body": "",
}


@pytest.mark.parametrize("where", ["in steps", "from step 1 on", "rehearsed"])
@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_each_body_changes_where_autograd_does_not_look(what: str, where: str, script: Script) -> None:
    """`.data` has no version. To clip in every body is right only if the first of a step has nothing to clip."""

    def change() -> None:
        if where == "from step 1 on" and script.run.step < 1:
            return
        for parameter in script.model.parameters():
            parameter.data.clamp_(-0.01, 0.01) if "clipped" in what else parameter.data.mul_(0.9)

    def body(x: torch.Tensor) -> None:
        if "before" in what:
            change()
        script.usual(x)
        if "behind" in what or ("final" in what and script.run.final_shard):
            change()

    said = WEIGHTS[what] if where != "rehearsed" or "before" not in what else ""
    with pytest.raises(FallowError, match=said) if said else contextlib.nullcontext():
        rehearse(script, body) if where == "rehearsed" else script.train(body)
    if where != "rehearsed":
        assert script.run.step == (2 if not said else int(where == "from step 1 on"))


@pytest.mark.parametrize("where", ["before", "behind", "in the final body"])
def test_an_optimizers_state_that_is_cleared_in_a_body(where: str, script: Script) -> None:
    """Before its backward each body of the step comes to the same; behind it, the final body's step would miss it."""

    def body(x: torch.Tensor) -> None:
        now = script.run.step == 1
        if now and where == "before":
            script.optimizer.state.clear()
        script.usual(x)
        if now and (where == "behind" or (where != "before" and script.run.final_shard)):
            script.optimizer.state.clear()

    refused = pytest.raises(FallowError, match=r"an optimizer's state behind its backward.*`if run.final_shard:`")
    with refused if where == "behind" else contextlib.nullcontext():
        script.train(body)
    assert script.run.step == (1 if where == "behind" else 2)


def test_weights_that_change_by_one_member_s_gradient(script: Script) -> None:
    """As with one shard for each member, where no body is void: all would train, each by itself."""

    def body(x: torch.Tensor) -> None:
        if not script.run.final_shard:
            return
        gradients = torch.autograd.grad(script.loss(x), list(script.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(script.model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient

    with pytest.raises(FallowError, match="by hand without a backward"):
        script.train(body)


@pytest.mark.parametrize("once", [False, True])
def test_a_teacher_that_follows_the_model_does_so_once_a_step(once: bool, script: Script) -> None:
    teacher = copy.deepcopy(script.model).requires_grad_(False)
    followed = 0

    def body(x: torch.Tensor) -> None:
        nonlocal followed
        script.usual(x)
        if script.run.final_shard or not once:
            followed += 1
            with torch.no_grad():
                for mean, parameter in zip(teacher.parameters(), script.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)

    if once:
        script.train(body, teacher)
        assert (script.run.step, followed) == (2, 2)
    else:
        with pytest.raises(FallowError, match=r"once per shard.*`if run\.final_shard:` first, as for a moving average"):
            script.train(body, teacher)
        assert followed == 1


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_come_from_no_backward(scaled: bool, script: Script) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def body(x: torch.Tensor) -> None:
        parameters = list(script.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(script.loss(x), parameters), strict=True):
            parameter.grad = gradient
        scaler.step(optimizer=script.optimizer)
        script.optimizer.zero_grad()

    with pytest.raises(FallowError, match=r"step 0: .*gradients that no backward\(\) of this step has made"):
        script.train(body, scaler)


@pytest.mark.parametrize("stepping", [False, True])
def test_a_step_that_is_left_out_by_all(stepping: bool, script: Script) -> None:
    """Its loss is not finite, say. A step on no gradients or on zeros does nothing, as without us."""

    def body(x: torch.Tensor) -> None:
        if script.run.step != 1:
            script.loss(x).backward()
        elif not stepping:
            return
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=False)

    script.train(body, epochs=2)
    assert script.run.step == 4


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_work_after_a_step_is_refused_in_the_first_body_already(what: str, script: Script) -> None:
    bodies = []

    def body(x: torch.Tensor) -> None:
        bodies.append(x)
        kept = script.loss(x)
        script.usual(x)
        if what == "forward":
            script.model(x)
        else:
            kept.backward()

    with pytest.raises(FallowError, match=rf"a {what} after an optimizer's step"):
        script.train(body)
    assert len(bodies) == 1


@pytest.mark.parametrize("what", ["schedule", "average"])
@pytest.mark.parametrize("where", ["first", "between", "phase", "before phases"])
def test_what_acts_before_a_backward_is_refused_in_the_first_body_already(
    what: str, where: str, script: Script
) -> None:
    """It never acted, or could act twice."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    average = torch.optim.swa_utils.AveragedModel(script.model)
    bodies = []

    def act() -> None:
        schedule.step() if what == "schedule" else average.update_parameters(script.model)

    def body(x: torch.Tensor) -> None:
        bodies.append(x)
        if where in ("first", "before phases"):
            act()
        if "phase" not in where or script.run.phase("one"):
            if where == "phase":
                act()
            script.loss(x).backward()
            if where == "between":
                act()
                script.loss(x).backward()
        if "phase" in where and script.run.phase("two"):
            script.usual(x)

    with pytest.raises(FallowError, match="call it after the last backward of the body"):
        script.train(body, schedule, average)
    assert len(bodies) == 1


def test_what_acts_may_come_between_phases(script: Script) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    average = torch.optim.swa_utils.AveragedModel(script.model)

    def body(x: torch.Tensor) -> None:
        if script.run.phase("one"):
            script.usual(x)
        average.update_parameters(script.model)
        if script.run.phase("two"):
            script.usual(x)
        schedule.step()

    script.train(body, schedule, average)
    assert (script.optimizer.param_groups[0]["lr"], int(average.n_averaged)) == (0.025, 2)


def test_a_module_in_a_loop_can_be_saved_and_copied(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        script.usual(x)
        file = io.BytesIO()
        torch.save(script.model, file)
        file.seek(0)
        for twin in (torch.load(file, weights_only=False), copy.deepcopy(script.model)):
            with torch.no_grad():
                torch.testing.assert_close(twin(x), script.model(x))

    script.train(body)
    assert not script.model._forward_pre_hooks


def test_a_refusal_that_the_body_swallows(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        script.usual(x)
        with contextlib.suppress(Exception):
            script.loss(x).backward()

    with pytest.raises(FallowError, match="after an optimizer's step"):
        script.train(body)


def test_a_backward_that_failed_half_way(script: Script) -> None:
    def fails(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    def body(x: torch.Tensor) -> None:
        hidden = script.model[0](x)
        hidden.register_hook(fails)
        with contextlib.suppress(RuntimeError):
            script.model[2](hidden).sum().backward()

    with pytest.raises(FallowError, match=r"RuntimeError \(out of memory\) and the body went on"):
        script.train(body)


def test_a_step_inside_backward(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        for parameter in script.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: script.optimizer.step())
        script.usual(x)

    with pytest.raises(FallowError, match="step inside backward"):
        script.train(body)


def test_hooks_that_would_see_the_sum_of_some_shards(script: Script) -> None:
    handle = script.model[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.1, 0.1))
    with pytest.raises(FallowError, match="register_post_accumulate_grad_hook, which would see the sum of some"):
        script.train(script.usual)
    assert script.run.step == 0
    handle.remove()

    def body(x: torch.Tensor) -> None:
        if not bodies:
            late.model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
        bodies.append(x)
        late.usual(x)

    late, bodies = Script(), list[torch.Tensor]()
    with pytest.raises(FallowError, match="register_post_accumulate_grad_hook"):
        late.train(body)
    assert len(bodies) == 1
    other, seen = Script(), list[torch.Tensor]()
    other.model[2].bias.register_hook(seen.append)
    other.train(other.usual)
    assert (other.run.step, len(seen)) == (2, 6)


def test_loops_in_loops(script: Script) -> None:
    other = script.run.prepare(DataLoader(TensorDataset(torch.randn(12, 3)), 2), global_batch=6)

    def nested(x: torch.Tensor) -> None:
        for _ in script.run.steps(other):
            pass

    with pytest.raises(FallowError, match="inside the body of another"):
        script.train(nested)
    beside = Script()
    first, second = (beside.run.prepare(DataLoader(beside.loader.dataset, 2), global_batch=6) for _ in range(2))
    with pytest.raises(FallowError, match="zip"):
        next(zip(beside.run.steps(first), beside.run.steps(second), strict=True))


def test_parameters_that_come_later(script: Script) -> None:
    script.train(script.usual)
    script.model.append(nn.Linear(1, 1))
    with pytest.raises(FallowError, match="other parameters than in the first"):
        next(script.run.steps(script.run._member.loader))


@pytest.mark.parametrize("what", ["module", "parameter", "exchanged", "elsewhere", "again"])
def test_parameters_that_a_body_adds(what: str, script: Script) -> None:
    """They were trained by each member for itself, or it was said that learning rates change."""

    def body(x: torch.Tensor) -> None:
        script.usual(x)
        if what == "module":
            script.model.append(nn.Linear(1, 1))
        elif what == "parameter":
            script.model[2].scale = nn.Parameter(torch.ones(1))
        elif what == "exchanged":
            script.model[2] = nn.Linear(4, 1)
        elif what == "elsewhere":
            script.optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
        else:
            script.model[2] = nn.Sequential(script.model[2], nn.Tanh())[0]

    if what == "again":
        script.train(body)
    else:
        said = {
            "module": r"adds parameters \(model\.0\.3\) to a prepared module: .* build the whole model before",
            "parameter": r"adds parameters \(model\.0\.2\.scale\)",
            "exchanged": r"adds parameters \(model\.0\.2\)",
            "elsewhere": "holds 2 parameters that belong to no prepared module",
        }
        with pytest.raises(FallowError, match=said[what]):
            script.train(body)
        assert script.run.step == 0
    script.model.append(nn.Linear(1, 1))  # the script's own affair, until it begins another loop


def test_thawing_in_the_loop(script: Script) -> None:
    script.model[0].requires_grad_(False)
    with pytest.raises(FallowError, match="frozen when it was prepared"):
        script.train(lambda x: (script.usual(x), script.model[0].requires_grad_(True)))


class Cache(nn.Module):
    """Remembers positions, more of them when it needs more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.arange(len(self.seen) + 1.0)
        return x


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("rehearsed", [True, False])
def test_buffers_that_grow_in_forward(trained: bool, rehearsed: bool, script: Script) -> None:
    script.model.append(Cache())
    reached = []

    def body(x: torch.Tensor) -> None:
        loss = script.loss(x)
        if trained:
            loss.backward()
            reached.append(True)

    with pytest.raises(FallowError, match=r"buffer model\.0\.3\.seen changed its shape or type in forward: give it"):
        rehearse(script, body) if rehearsed else script.train(body)
    assert not reached, "nothing of it was told to other members"


@pytest.mark.parametrize("reproducible", [True, False])
def test_freezing_after_prepare_keeps_the_place_in_the_sums(reproducible: bool) -> None:
    """So a newcomer whose script comes to the loop later, with a part frozen by then, sums up what the members do."""
    early, late = Script(), Script()
    for script, freeze_at in ((early, 0), (late, 1)):
        prepared = (script.model, script.optimizer, script.loader)
        loader = script.run.prepare(*prepared, global_batch=6, reproducible=reproducible)[-1]
        for call in range(3):
            script.model[0].requires_grad_(call < freeze_at or call == 2)
            before = script.model[0].weight.detach().clone()
            for (x,) in script.run.steps(loader):
                script.usual(x)
            assert torch.equal(before, script.model[0].weight) == (freeze_at <= call < 2)
    layouts = [script.run._member.reducer._names for script in (early, late)]
    assert layouts[0] == layouts[1]
    assert early.run._prepared.layout() == late.run._prepared.layout()
    other = Script()
    other.model[0].requires_grad_(False)
    other.run.prepare(other.model, other.optimizer)
    assert [line for line in other.run._prepared.layout() if line not in early.run._prepared.layout()] == [
        "model.0.0.weight float32[4, 3] frozen",
        "model.0.0.bias float32[4] frozen",
    ]


def test_freezing_a_part_for_a_while_as_gans_do(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        script.model[0].requires_grad_(False)
        script.loss(x).backward()
        script.model[0].requires_grad_(True)
        script.usual(x)

    script.train(body)


def test_what_a_body_switches_behind_its_backward_counts_from_the_next_step_on(script: Script) -> None:
    """Not from the step's next shard on, which may be another member's."""
    seen = []

    def body(x: torch.Tensor) -> None:
        seen.append((script.run.step, script.model[1].training, script.model[0].weight.requires_grad))
        script.usual(x)
        if script.run.step == 1:
            script.model[1].eval()
            script.model[0].weight.requires_grad_(False)

    script.train(body, epochs=2)
    assert seen == [(step, step < 2, step < 2) for step in range(4) for _ in range(3)]


def test_members_tell_each_other_which_modules_rest_in_the_final_backward(script: Script) -> None:
    told = []

    def body(x: torch.Tensor) -> None:
        if script.run.final_shard:
            script.model[1].train(script.run.step != 1)  # for the backward of this very body, and those after it
        script.usual(x)
        if script.run.final_shard:
            reducer = script.run._member.reducer
            told.append((reducer.resting, reducer.control.head.resting, reducer.frozen))
        script.model.eval()  # an evaluation
        script.model.train()

    script.train(body, epochs=2)
    ours, sums, frozen = zip(*told, strict=True)
    assert ours == sums
    assert 0 != ours[0] == ours[2] == ours[3] != ours[1] != 0
    assert len(set(frozen)) == 1


def test_what_a_body_switches_once_and_for_all_before_its_backward_stays(script: Script) -> None:
    done = []

    def body(x: torch.Tensor) -> None:
        if script.run.step == 1 and not done:
            done.append(script.model[1].eval())
            script.model[0].requires_grad_(False)
        assert script.model[1].training == (script.run.step < 1)
        script.usual(x)

    script.train(body, epochs=2)
    assert not script.model[0].weight.requires_grad


def test_freezing_a_part_for_the_second_of_two_backwards(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        assert script.model[0].weight.requires_grad
        script.loss(x).backward()
        script.model[0].requires_grad_(False)
        script.loss(x).backward()
        script.model[0].requires_grad_(True)
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.train(body)


@pytest.mark.parametrize("how", ["after", "before", "zeros", "never"])
def test_gradients_gathered_over_steps_where_the_membership_can_change(how: str, script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        if how == "before":
            script.optimizer.zero_grad()
        script.loss(x).backward()
        if how != "never" or script.run.step == 1:
            script.optimizer.step()
        if how in ("after", "zeros"):
            script.optimizer.zero_grad(set_to_none=how == "after")

    objects = script.run.prepare(script.model, script.optimizer)
    script.run._member.reducer.elastic = True
    loader = script.run.prepare(script.loader, global_batch=6)
    assert objects[0] is script.model

    def train() -> None:
        for (x,) in script.run.steps(loader):
            body(x)

    if how == "never":
        with pytest.raises(FallowError, match="raise global_batch"):
            train()
    else:
        train()


@pytest.mark.parametrize("how", ["none", "zeros", "kept", "done again"])
def test_gradients_that_another_networks_loss_has_left_may_be_dropped_between_two_backwards(how: str) -> None:
    """As a GAN's loop does whose critic's loss reaches the generator, too."""
    trained = []
    for elastic in (False, True):
        script = Script()
        make, judge = nn.Linear(3, 3), nn.Linear(3, 1)
        makes, judges = (torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (make, judge))
        *_, loader = script.run.prepare(make, judge, makes, judges, script.loader, global_batch=6)
        reducer = script.run._member.reducer
        reducer.elastic = elastic
        attempts = 0
        refused = elastic and how in ("kept", "done again")
        with pytest.raises(FallowError, match="gathered over several steps") if refused else contextlib.nullcontext():
            for (x,) in script.run.steps(loader, epochs=2):
                judges.zero_grad()
                (judge(x).mean() - judge(make(x)).mean()).backward()
                if script.run.final_shard and script.run.step == 1:
                    attempts += 1
                    if how == "done again" and attempts == 1:
                        reducer.interrupted = reducer.again = True
                        continue
                if how in ("none", "zeros"):
                    makes.zero_grad(set_to_none=how == "none")
                judge(make(x)).square().mean().backward()
                makes.step()
                judges.step()
        assert script.run.step == (1 if refused else 4)
        assert attempts == 1 + (how == "done again")
        trained.append([p.tolist() for p in (*make.parameters(), *judge.parameters())])
    assert (trained[0] == trained[1]) == (how in ("none", "zeros"))


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_a_skipped_shard_is_zeros_and_everything_else_goes_on(bad: int, script: Script) -> None:
    """Shard 5 is the final body of the second step: clipping and schedule must act there all the same."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    clipped = []

    def body(x: torch.Tensor) -> None:
        if torch.equal(x, script.loader.dataset.tensors[0][2 * bad : 2 * bad + 2]):
            return
        script.loss(x).backward()
        clipped.append(float(nn.utils.clip_grad_norm_(script.model.parameters(), 0.01)))
        script.optimizer.step()
        schedule.step()
        script.optimizer.zero_grad()

    script.train(body, schedule)
    assert schedule.get_last_lr() == [0.025]
    assert sum(norm > 0 for norm in clipped) == 2
    twin = Script()
    for first in (0, 6):
        x = twin.loader.dataset.tensors[0][first : first + 6]
        shards = [x[n : n + 2] for n in (0, 2, 4) if first + n != 2 * bad]
        (sum(twin.loss(shard) for shard in shards) / 3).backward()
        nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01)
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        twin.optimizer.param_groups[0]["lr"] *= 0.5
    for a, b in zip(script.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_training_on_batches_that_were_taken_out_of_the_loop(script: Script) -> None:
    """Each member would train by itself, on its own shards."""
    *_, loader = script.run.prepare(script.model, script.optimizer, script.loader, global_batch=6)
    batches = list(script.run.steps(loader))
    assert len(batches) == 6
    script.optimizer.step()  # on nothing
    with pytest.raises(FallowError, match="an optimizer's step outside of the body, after"):
        script.usual(batches[0][0])
    for (x,) in script.run.steps(loader):
        script.usual(x)
    script.usual(x)  # the script's own affair again


@pytest.mark.parametrize(
    ("calls", "refused"),
    [
        ("by turns", True),
        ("every third", False),
        ("every fourth", True),
        ("a rate every second", True),
        ("a rate", True),
        ("a rate, by step", False),
        ("by turns, by step", False),
        ("final", False),
        ("finite", False),
        ("with gradients", False),
        ("left out", False),
    ],
)
def test_bodies_of_one_step_that_call_different_things(calls: str, refused: bool, script: Script) -> None:
    """What counts bodies, or looks at one shard's loss, does something else with other members."""
    first, last = (torch.optim.SGD(script.model[number].parameters(), lr=0.1) for number in (0, 2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(first, 5)
    count = 0

    def body(x: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if calls == "left out" and count % 2:
            return
        script.loss(x).backward()
        norm = nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
        final = script.run.final_shard
        if calls.startswith("by turns"):
            (first, last)[(script.run.step if calls.endswith("step") else count) % 2].step()
        elif calls.startswith("every"):
            if count % (3 if calls.endswith("third") else 4) == 0:
                first.step()
        elif calls.startswith("a rate"):
            first.step()
            if count % 2 or not calls.endswith("second"):
                schedule.step((script.run.step if calls.endswith("step") else count) / 3)
        elif {
            "final": final,
            "finite": bool(torch.isfinite(norm)) and not (final and script.run.step),
            "with gradients": script.model[0].weight.grad is not None,
            "left out": True,
        }[calls]:
            first.step()
        script.model.zero_grad()

    script.optimizer = first
    expected = pytest.raises(FallowError, match="the bodies of one step call different optimizers")
    with expected if refused else contextlib.nullcontext():
        script.train(body, last, schedule)


@pytest.mark.parametrize(("leaves", "refused"), [(0, False), (1, True), (2, True), (3, False), ("early", False)])
def test_leaving_the_loop_in_the_middle_of_a_step(leaves: int | str, refused: bool, script: Script) -> None:
    """As a count of bodies does (itertools.islice); behind the last one, or in front of the first, it is no matter."""
    *_, loader = script.run.prepare(script.model, script.optimizer, script.loader, global_batch=6)
    for (x,) in itertools.islice(script.run.steps(loader), None if leaves == "early" else leaves):
        if script.run.step == 1:
            break
        script.usual(x)
    with pytest.raises(FallowError, match="left in the middle of a step") if refused else contextlib.nullcontext():
        script.run.barrier()
        assert script.run.step == (leaves != 0)


def test_an_exception_on_its_way_out_of_the_loop_is_the_scripts_own(script: Script) -> None:
    def body(x: torch.Tensor) -> None:
        script.usual(x)
        raise ZeroDivisionError

    def train() -> None:
        try:
            script.train(body)
        finally:
            script.run.barrier()

    with pytest.raises(ZeroDivisionError):
        train()


@pytest.mark.parametrize(("how", "refused"), [("by hand", True), ("one shard", False), ("phases", False)])
def test_weights_that_change_between_two_backwards(how: str, refused: bool, script: Script) -> None:
    """Sharpness-aware minimization: the second gradient is that of weights which the first one has moved."""
    if how == "one shard":
        script.loader = DataLoader(script.loader.dataset, 6)
    moved: list[tuple[nn.Parameter, torch.Tensor]] = []

    def first(x: torch.Tensor) -> None:
        script.loss(x).backward()
        if script.run.final_shard:
            moved[:] = [(p, 0.1 * p.grad) for p in script.model.parameters() if p.grad is not None]
            for parameter, way in moved:
                parameter.detach().add_(way)
        script.optimizer.zero_grad()

    def second(x: torch.Tensor) -> None:
        script.loss(x).backward()
        if script.run.final_shard:
            for parameter, way in moved:
                parameter.detach().sub_(way)
        script.optimizer.step()
        script.optimizer.zero_grad()

    def body(x: torch.Tensor) -> None:
        if how != "phases" or script.run.phase("first"):
            first(x)
        if how != "phases" or script.run.phase("second"):
            second(x)

    expected = pytest.raises(FallowError, match="weights were changed by hand between two backwards of a body")
    with expected if refused else contextlib.nullcontext():
        script.train(body)


def test_what_a_body_gives_to_an_optimizer_is_held_by_it(script: Script) -> None:
    script.optimizer = torch.optim.SGD(script.model[2].parameters(), lr=0.1)
    before = script.model[0].weight.clone()

    def body(x: torch.Tensor) -> None:
        script.usual(x)
        if script.run.final_shard and script.run.step == 0:
            script.optimizer.add_param_group({"params": script.model[0].parameters()})

    script.train(body)
    assert not torch.equal(before, script.model[0].weight)


@pytest.mark.parametrize("reproducible", [True, False])
def test_buffers_that_come_apart_are_found_where_bits_count(reproducible: bool) -> None:
    """By a forward in train mode behind the backward, say. Else the next broadcast brings them together."""
    run = Run(None, None, Group(0, 0, 1, None))
    model = run.prepare(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), reproducible=reproducible)
    watch = run._loop.step.watch

    def told() -> list[int]:
        return [watch.agreement(step, settled=True) for step in range(6)]

    before = told()
    assert told() == before
    model[1].running_var += 1
    assert (told() != before) is reproducible
    assert watch.agreement(0, settled=False) == watch.agreement(1, settled=False), "a newcomer may not have them yet"


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_scheduler_that_hears_another_loss_is_found_where_bits_count(reproducible: bool, script: Script) -> None:
    """Of one shard and not run.mean(loss). What is lowered by it may be so at another time on each member."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer)
    script.run.prepare(script.model, script.optimizer, schedule, reproducible=reproducible)
    watch = script.run._loop.step.watch
    told = []
    for loss in (0.5, 0.4, 0.4):
        schedule.step(loss)
        told.append(watch.agreement(0, settled=True))
    assert len(set(told)) == (3 if reproducible else 1)
