"""What becomes of scripts that do what they must not, in a world of two.

Prints a line of JSON for each case: its name, and by rank either the error's text or what came out.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset
from worlds import world

from fallow.worker.api.lazy_imports import defer_compiler_import
from fallow.worker.api.run import Run
from fallow.worker.data.source import FunctionSource

STEPS, ODD = 8, 3
"""Steps of a case, and the one in which something is odd."""


class Stream(IterableDataset[Any]):
    """Samples without numbers, from one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Any:
        return ((torch.full((4,), float(number % 16)), number % 2) for number in range(self.first, self.first + 16))


class Script:
    """One rank's training, which leaves its inner loop or its loop where a trap returns True."""

    def __init__(self, run: Run, case: str) -> None:
        self.run, self.case, self.bodies = run, case, 0
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        run.prepare(self.model, self.optimizer)

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.model[0].weight
        return weight

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 4), torch.randint(0, 2, (4,))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def updates(self) -> Any:
        return self.run.updates(self.batch, shards=4, max_steps=STEPS)

    def inner(self, update: Any) -> None:
        for batch in update:
            self.loss(batch).backward()

    def act(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """With all that is done wrong inside the usual loops."""

        def trap(place: str, update: Any) -> Any:
            where, act = TRAPS.get(self.case, ("", None))
            return act(self, update) if act and where == place and update.step == ODD else None

        for update in self.updates():
            trap("in front", update)
            for batch in update:
                if trap("body", update):
                    break
                self.loss(batch).backward()
                if trap("behind a backward", update):
                    break
            if trap("behind", update):
                break
            if self.case == "break without a step" and update.step == ODD:
                continue
            if self.case != "step of one member" or update.step != ODD or self.run.rank == 0:
                self.optimizer.step()
            if self.case != "forgotten zero_grad":
                self.optimizer.zero_grad()

    def lower_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.9

    def fail_backward(self, update: Any) -> None:
        """The script catches the error and goes on."""

        def boom(grad: torch.Tensor) -> None:
            raise RuntimeError("boom")

        loss = self.loss(self.batch())
        loss.register_hook(boom)
        try:
            loss.backward()
        except RuntimeError:
            return

    def fail_in_half_a_backward(self) -> None:
        """The second layer's gradients are there when the error comes; the script catches it and goes on."""

        def boom(grad: torch.Tensor) -> None:
            raise RuntimeError("boom")

        x, y = self.batch()
        hidden = self.model[0](x)
        hidden.register_hook(boom)
        with suppress(RuntimeError):
            F.cross_entropy(self.model[1](hidden), y).backward()

    def fail_on_rank_1(self) -> None:
        if self.run.rank == 1:
            raise ValueError("a sample is broken")

    def use_too_much_memory_on_rank_1(self) -> None:
        if self.run.rank == 1:
            torch.empty(1 << 60)

    def is_last_shard(self) -> bool:
        """Of this member: each of the two has two of a step."""
        self.bodies += 1
        return self.bodies == 2

    def samples_of_one_member(self) -> None:
        loader = self.run.prepare(DataLoader(Stream(self.run.rank), 2), global_batch=8)
        for update in self.run.updates(loader):
            self.inner(update)
            self.act()

    def forgotten_inner_loop(self) -> None:
        for _ in self.updates():
            self.loss(self.batch()).backward()
            self.act()

    def no_inner_loop(self) -> None:
        for _ in self.updates():
            pass

    def step_with_closure(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.weight.square().sum()
            loss.backward()
            return loss

        for update in self.updates():
            self.inner(update)
            self.optimizer.step(closure)

    def closure_over_a_list(self) -> None:
        for update in self.updates():
            batches = list(update)

            def closure(batches: list[Any] = batches) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = sum(map(self.loss, batches))  # type: ignore[assignment]
                loss.backward()
                return loss

            self.optimizer.step(closure)

    def list_of_an_update(self) -> None:
        for update in self.updates():
            for batch in list(update):
                self.loss(batch).backward()
            self.act()

    def list_of_updates(self) -> None:
        for update in list(self.updates()):
            self.inner(update)
            self.act()

    def sparse_gradients(self) -> None:
        """The script would go on whatever a backward raises."""
        embedding = nn.Embedding(4, 4, sparse=True)
        self.run.prepare(embedding)
        for update in self.updates():
            for batch in update:
                with suppress(Exception):
                    (self.loss(batch) + embedding(batch[1]).mean()).backward()
            self.act()

    def unprepared_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        for update in self.updates():
            for batch in update:
                scaler.scale(self.loss(batch)).backward()
            scaler.step(self.optimizer)

    def short(self) -> None:
        for batch in self.run.steps(FunctionSource(self.batch, 4), max_steps=STEPS):
            if self.case == "short, without a backward":
                continue
            if self.case == "short, step in front":
                self.optimizer.step()
            self.loss(batch).backward()
            if self.case == "short, two backwards":
                self.weight.square().sum().backward()
            if self.case == "short, closure":
                self.optimizer.step(lambda: 0.0)
            self.act()


TRAPS: dict[str, tuple[str, Callable[[Script, Any], object]]] = {
    "backward in front": ("in front", lambda script, _: script.weight.square().sum().backward()),
    "break": ("body", lambda *_: True),
    "break without a step": ("body", lambda *_: True),
    "break at the last shard": ("behind a backward", lambda script, _: script.is_last_shard()),
    "step inside": ("behind a backward", lambda script, _: script.optimizer.step()),
    "zero_grad inside": ("body", lambda script, _: script.optimizer.zero_grad()),
    "run.mean inside": ("body", lambda script, _: script.run.mean(1.0)),
    "run.barrier inside": ("body", lambda script, _: script.run.barrier()),
    "exception in a backward caught": ("body", Script.fail_backward),
    "exception in half a backward caught": ("body", lambda script, _: script.fail_in_half_a_backward()),
    "collective inside": ("body", lambda *_: distributed.all_reduce(torch.zeros(1))),
    "one member raises": ("body", lambda script, _: script.fail_on_rank_1()),
    "one member has no memory left": ("body", lambda script, _: script.use_too_much_memory_on_rank_1()),
    "nested updates": ("body", lambda script, _: list(script.updates())),
    "nested inner loops": ("body", Script.inner),
    "weights inside": ("behind a backward", lambda script, _: script.weight.detach().mul_(0.9) is None),
    "rate inside": ("behind a backward", lambda script, _: script.lower_rate()),
    "inner loop twice": ("behind", Script.inner),
    "mean of one member": ("behind", lambda script, _: script.run.rank == 0 and script.run.mean(1.0) < 0),
    "note behind": ("behind", lambda _, update: update.note(loss=1.0)),
    "mean of nothing": ("behind", lambda _, update: update.mean("loss")),
    "regularizer behind": ("behind", lambda script, _: script.weight.square().sum().backward()),
    "all break": ("behind", lambda *_: True),
    "one member breaks": ("behind", lambda script, _: script.run.rank == 0),
    "rate of one member": ("behind", lambda script, _: script.run.rank == 0 and script.lower_rate()),
    "evaluation of one member": ("behind", lambda script, _: script.model.train(script.run.rank > 0) is None),
}
"""Case -> where in the odd step something is done, and what."""

SHORT = ("", ", without a backward", ", step in front", ", two backwards", ", closure")

WHOLE: dict[str, Callable[[Script], None]] = {
    **dict.fromkeys(("usual", *TRAPS, "step of one member", "forgotten zero_grad"), Script.train),
    "forgotten inner loop": Script.forgotten_inner_loop,
    "no inner loop": Script.no_inner_loop,
    "step with a closure": Script.step_with_closure,
    "closure over a list": Script.closure_over_a_list,
    "list of an update": Script.list_of_an_update,
    "list of updates": Script.list_of_updates,
    "samples of one member": Script.samples_of_one_member,
    "sparse gradients": Script.sparse_gradients,
    "unprepared scaler": Script.unprepared_scaler,
    **dict.fromkeys((f"short{what}" for what in SHORT), Script.short),
}


def play(run: Run, case: str) -> dict[str, Any]:
    """Returns what came out."""
    script = Script(run, case)
    WHOLE[case](script)
    mean = run.mean(float(run.rank))
    weights = [value for parameter in script.model.parameters() for value in parameter.flatten().tolist()]
    return {"steps": run.step, "mean": mean, "weights": weights}


def main() -> None:
    torch.set_num_threads(1)
    defer_compiler_import()  # as `import fallow` does in a worker
    for case in WHOLE:
        print(json.dumps([case, world(2, lambda run: play(run, case))]), flush=True)  # noqa: B023


if __name__ == "__main__":
    main()
