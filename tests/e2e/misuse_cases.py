"""What becomes of scripts that do what they must not, in a world of two: misuse_cases.py [CASE ...].

Prints a line of JSON for each case: its name, and by rank either the error's text or what came out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset
from worlds import world

from fallow.worker.api.lazy_imports import put_off_compiler
from fallow.worker.api.run import Run
from fallow.worker.data.source import Calls

STEPS, ODD = 8, 3
"""Steps of a case, and the one in which something is odd."""


class Stream(IterableDataset[Any]):
    """Samples without numbers, from one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((4,), float(number % 16)), number % 2) for number in range(self.first, self.first + 16))


def boom(grad: torch.Tensor) -> None:
    """A hook of the script's that fails."""
    raise RuntimeError("boom")


class Script:
    """One rank's training."""

    def __init__(self, run: Run, case: str) -> None:
        self.run, self.case = run, case
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

    def closure(self) -> float:
        return float(self.loss(self.batch()))

    def act(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """With all that is done wrong inside the usual loops."""
        case, run = self.case, self.run
        for update in self.updates():
            odd = update.step == ODD
            if odd and case == "backward in front":
                self.weight.square().sum().backward()
            for number, batch in enumerate(update):
                if odd and case.startswith("break") and number == (case == "break in the last body"):
                    break
                if odd and self.odd_body(batch):
                    continue
                self.loss(batch).backward()
                if odd and case == "weights inside":
                    with torch.no_grad():
                        self.weight.mul_(0.99)
                if odd and case == "rate inside":
                    self.optimizer.param_groups[0]["lr"] *= 0.9
            if odd and self.odd_end(update):
                break
            if odd and case == "break without a step":
                continue
            if not odd or case != "step of one member" or run.rank == 0:
                self.optimizer.step()
            if case != "forgotten zero_grad":
                self.optimizer.zero_grad()

    def odd_body(self, batch: Any) -> bool:
        """True: without another backward."""
        case, run = self.case, self.run
        match case:
            case "step inside":
                self.loss(batch).backward()
                self.optimizer.step()
                return True
            case "zero_grad inside":
                self.optimizer.zero_grad()
            case "collective inside":
                dist.all_reduce(torch.zeros(1))
            case "run.mean inside":
                run.mean(1.0)
            case "run.barrier inside":
                run.barrier()
            case "exception in a backward caught" | "half a backward caught":
                hidden = self.model[0](batch[0])
                loss = F.cross_entropy(self.model[1](hidden), batch[1])
                (hidden if case.startswith("half") else loss).register_hook(boom)
                try:
                    loss.backward()
                except RuntimeError:
                    return True
            case "one member raises" if run.rank == 1:
                raise ValueError("a sample is broken")
            case "nested updates":
                list(self.updates())
            case "nested inner loops":
                self.inner(run._loop.update)
            case _:
                return False
        return False

    def inner(self, update: Any) -> None:
        for batch in update:
            self.loss(batch).backward()

    def odd_end(self, update: Any) -> bool:
        """True: the loop is left."""
        case, run = self.case, self.run
        match case:
            case "inner loop twice":
                self.inner(update)
            case "mean of one member" if run.rank == 0:
                run.mean(1.0)
            case "note behind":
                update.note(loss=1.0)
            case "mean of nothing":
                update.mean("loss")
            case "regularizer behind":
                (0.01 * self.weight.square().sum()).backward()
            case "all break":
                return True
            case "one member breaks":
                return run.rank == 0
            case "rate of one member" if run.rank == 0:
                self.optimizer.param_groups[0]["lr"] *= 0.9
            case "freezing of one member" if run.rank == 0:
                self.model[1].bias.requires_grad_(False)
            case "evaluation of one member" if run.rank == 0:
                self.model.eval()
        return False

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

    def list_of_an_update(self) -> None:
        for update in self.updates():
            for batch in list(update):
                self.loss(batch).backward()
            self.act()

    def list_of_updates(self) -> None:
        for update in list(self.updates()):
            self.inner(update)
            self.act()

    def unprepared_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        for update in self.updates():
            for batch in update:
                scaler.scale(self.loss(batch)).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()

    def short(self) -> None:
        for batch in self.run.steps(Calls(self.batch, 4), max_steps=STEPS):
            if self.case == "short, without a backward":
                continue
            if self.case == "short, step in front":
                self.optimizer.step()
            self.loss(batch).backward()
            if self.case == "short, two backwards":
                (0.1 * self.weight.square().sum()).backward()
            if self.case == "short, closure":
                self.optimizer.step(self.closure)
            self.act()


INSIDE = [
    *(
        "usual",
        "break",
        "break in the last body",
        "break without a step",
        "step inside",
        "zero_grad inside",
        "collective inside",
    ),
    *("run.mean inside", "run.barrier inside", "exception in a backward caught", "half a backward caught"),
    *("one member raises", "nested updates", "nested inner loops", "weights inside", "rate inside"),
    *("inner loop twice", "mean of one member", "regularizer behind", "all break", "one member breaks"),
    *("rate of one member", "freezing of one member", "evaluation of one member"),
    *("forgotten zero_grad", "backward in front", "step of one member", "note behind", "mean of nothing"),
]
WHOLE: dict[str, Callable[[Script], None]] = {
    "forgotten inner loop": Script.forgotten_inner_loop,
    "no inner loop": Script.no_inner_loop,
    "list of an update": Script.list_of_an_update,
    "list of updates": Script.list_of_updates,
    "samples of one member": Script.samples_of_one_member,
    "unprepared scaler": Script.unprepared_scaler,
    "short": Script.short,
    "short, two backwards": Script.short,
    "short, without a backward": Script.short,
    "short, step in front": Script.short,
    "short, closure": Script.short,
}


def play(run: Run, case: str) -> dict[str, Any]:
    """Returns what came out."""
    script = Script(run, case)
    WHOLE.get(case, Script.train)(script)
    mean = run.mean(float(run.rank))
    weights = [value for parameter in script.model.parameters() for value in parameter.flatten().tolist()]
    return {"steps": run.step, "mean": mean, "weights": weights}


def main() -> None:
    """All cases, or those that are named."""
    torch.set_num_threads(1)
    put_off_compiler()  # as `import fallow` does in a worker
    for case in sys.argv[1:] or [*INSIDE, *WHOLE]:
        print(json.dumps([case, world(2, lambda run: play(run, case))]), flush=True)  # noqa: B023


if __name__ == "__main__":
    main()
