"""Any history of members that come, go and are lost ends with the same bits, and with each sample exactly once.

Members are threads and have no network, so that a thousand histories take minutes; `tests/elastic/test_histories.py`
draws fewer of them for real processes.
"""

import string
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fallow.worker.api.run import Run
from fallow.worker.loop.generations import Released
from fallow.worker.session.orders import OthersEnded
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import GLOBAL_BATCH, Script

STEPS, EPOCHS, CALLS = 12, 2, 2
MOST = 4


def train(run: Run) -> Script:
    """Exact sums; in epochs and several calls, between which all wait for each other."""
    script = Script(run, batch_size=2).prepare(reproducible=True)
    for epoch in run.epochs(EPOCHS):
        for _ in range(CALLS):
            train_in_a_call(run, script)
            run.barrier()
        run.mean(float(epoch))
    return script


def train_in_a_call(run: Run, script: Script) -> None:
    """Parts of the model rest in some steps, and a second backward voids a sum. The last pass is cut short."""
    rests: Any = script.model[0]
    assert isinstance(rests, nn.Linear)
    for update in run.updates(script.loader, epochs=2, max_steps=STEPS // EPOCHS // CALLS):
        rests.requires_grad_(update.step % 5 != 3)
        for batch in update:
            loss = script.loss(batch)
            loss.backward()
            if update.step == 6:
                script.loss(batch).backward()
            update.note(loss=loss)
        if update.step % 3 == 0:
            run.mean(update.mean("loss"))
        script.act()


def bits(script: Script) -> list[bytes]:
    """Weights and the optimizer's state."""
    momenta = [state["momentum_buffer"] for state in script.optimizer.state.values()]
    return [tensor.detach().numpy().tobytes() for tensor in (*script.model.parameters(), *momenta)]


@cache
def undisturbed() -> list[bytes]:
    """By one member."""
    with tempfile.TemporaryDirectory() as folder:
        return bits(World(Path(folder), Generation("a")).train(train)["a"])


@st.composite
def histories(draw: st.DrawFn, longest: int) -> list[Generation]:
    """Generations; in each there is a node that was in a whole one before, or has been there from the start."""
    per_node = draw(st.sampled_from([1, 2]))
    nodes = iter(zip(*[iter(string.ascii_letters)] * per_node, strict=True))
    most = MOST // per_node

    def some(most: int) -> tuple[tuple[str, ...], ...]:
        return tuple(next(nodes) for _ in range(draw(st.integers(0, most))))

    def generation(breaks: Break | None = None) -> Generation:
        return Generation("".join(map("".join, members)), at_step, breaks, workers_per_node=per_node)

    members = (next(nodes), *some(most - 1))
    holders, generations, at_step, step = set(members), [], None, 0
    for _ in range(draw(st.integers(1, longest))):
        if draw(st.booleans()):
            wait = draw(st.integers(1, 40))
            may_die = [worker for node in members if holders - {node} for worker in node]
            dies = draw(st.sampled_from(["", *may_die]))
            certain = draw(st.frozensets(st.sampled_from("".join(map("".join, members)))))
            generations.append(generation(Break(wait, certain, dies)))
            members = tuple(node for node in members if dies not in node)  # it goes with all its workers
            at_step = None
        else:
            generations.append(generation())
            holders, step = set(members), step + draw(st.integers(1, 4))
            at_step = step
            leaving = draw(st.frozensets(st.sampled_from(members)))
            if holders - leaving:
                members = tuple(node for node in members if node not in leaving)
            members += some(most - len(members))  # behind a break, the head has newcomers wait for the end of the step
        holders &= set(members)
    return [*generations, generation()]


def play(history: list[Generation]) -> None:
    """Train by it, and judge."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), *history)
        found = world.train(train)
        torch_optimizer._global_optimizer_pre_hooks.clear()  # of thousands of runs
        whole = [one for one in found.values() if isinstance(one, Script)]
        for name, one in found.items():
            assert isinstance(one, Script | Killed | Released | OthersEnded), f"{name}: {one!r}"
        assert whole
        for script in whole:
            assert bits(script) == undisturbed()
        report = world.samples(STEPS, GLOBAL_BATCH)
    assert (report.consumed, report.lost, report.duplicated) == (STEPS * GLOBAL_BATCH, 0, 0)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(5))
def test_any_short_history_ends_with_the_same_bits(history: list[Generation]) -> None:
    play(history)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=1000, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(histories(9))
def test_a_thousand_histories_end_with_the_same_bits(history: list[Generation]) -> None:
    play(history)
