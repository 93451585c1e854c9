"""The public API: `fallow.init`, `Run`, `Released`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fallow.model import Deserted, Exit, Failed, FallowError, Finished, Outcome, Welcome
from fallow.worker.api import fixed, process
from fallow.worker.data.ledger import LAST_S
from fallow.worker.data.loader import ElasticLoader, check_loader
from fallow.worker.data.source import Source
from fallow.worker.data.stream_loader import StreamLoader
from fallow.worker.handover import state
from fallow.worker.loop.loop import Loop
from fallow.worker.loop.member import Member
from fallow.worker.loop.together import Kind
from fallow.worker.loop.turn import SwitchedOut
from fallow.worker.prepared.objects import Gate, Prepared
from fallow.worker.reduction.exact import Exact
from fallow.worker.reduction.reducer import EndedAlone
from fallow.worker.session.session import Dismissed, Session, connection
from fallow.worker.session.voice import IsMain
from fallow.worker.transport.group import Group, Interrupted

_DELIVERY_S = 5.0
"""How long the end of a process waits for the head to have heard of it."""

_NO_GROUP = ("env:// rendezvous", "Default process group has not been initialized")
"""In what torch.distributed says where nobody has told it of a fixed world."""


class Released(SystemExit):
    """This worker has left the run at a step boundary; the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Run:
    """One elastic training, seen from a script. Made by `fallow.init`.

    Args:
        session: conversation with the head; None in a fixed world.
        welcome: what the head said; None in a fixed world.
        group: the fixed world's group; None under a head.
    """

    def __init__(self, session: Session | None, welcome: Welcome | None, group: Group | None) -> None:
        self._session = session
        self._welcome = welcome
        self._gate = Gate()
        self._gate.between = self._between
        self._prepared = Prepared(self._gate)
        self._seed = welcome.seed if welcome is not None else 0
        self._max_workers = welcome.max_workers if welcome is not None else (group.size if group else 1)
        self._member = Member(self._prepared, self._gate, self._seed, session, welcome, group)
        self._place = self._member.place
        self._loop = Loop(self._member)
        self._released = False
        self._is_main = IsMain(self._speaks)
        self._call: Generator[Any, None, None] | None = None
        "the run.steps call at work, or the last one"

    # ------------------------------------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, global_batch: int | None = None, reproducible: bool = False) -> Any:
        """Take over models, optimizers, loaders, schedulers, scalers and whatever else has a state.

        Args:
            objects: modules, optimizers, DataLoaders, generators of random numbers (of torch, numpy or `random`:
                each body finds them seeded for its shard, and so does a data set that holds them), and objects with
                state_dict and load_state_dict.
            global_batch: samples of one optimizer step, whoever computes them; default: the loader's batch size
                times the run's maximum number of workers (or the fixed world's size).
            reproducible: the same final weights, bit for bit, whoever computes which shard: gradients are summed as
                integers (see `fallow.worker.reduction.exact.Exact`), at 1.25 times the step time and 20 bytes per
                parameter instead of 4. A step whose gradients outgrow their scale is done again, most often the
                first one; deterministic kernels are chosen for the whole process. Newcomers that would compute other
                bits (processor, threads, versions, settings) are refused. FALLOW_REPRODUCIBLE=1 does the same.

        Returns:
            The objects in the same order (a single one by itself): the same ones, except that a DataLoader is
            replaced by an elastic one for `steps`.

        Raises:
            FallowError: an object cannot be prepared; the text says what to write instead.
        """
        if self._place.calls:
            raise FallowError("prepare everything before the first run.steps: members must agree on the state")
        if (reproducible or os.environ.get("FALLOW_REPRODUCIBLE") == "1") and not self._prepared.reproducible:
            self._prepared.arithmetic = Exact()
        done = [self._prepare_one(thing, global_batch) for thing in objects]
        return done[0] if len(done) == 1 else tuple(done)

    def _prepare_one(self, thing: Any, global_batch: int | None) -> Any:
        if not isinstance(thing, DataLoader):
            self._prepared.add(thing)
            return thing
        check_loader(thing)
        assert thing.batch_size is not None
        kind = StreamLoader if isinstance(thing.dataset, IterableDataset) else ElasticLoader
        made = kind(thing, self._seed, global_batch or thing.batch_size * self._max_workers)
        made.generators = self._prepared.generators
        return made

    # ------------------------------------------------------------------------------------------------ the loop

    def steps(self, loader: Source, epochs: int = 1, max_steps: int | None = None) -> Generator[Any, None, None]:
        """Batches of this member's shards; the only place where the membership changes.

        Args:
            loader: a DataLoader that went through `prepare`.
            epochs: passes over the data, or over the stream.
            max_steps: end after so many optimizer steps of this call, if that comes first.

        Raises:
            Released: this worker leaves the run (ends the process with code 0).
            FallowError: the members disagree, or the head is gone for good.
        """
        if not isinstance(loader, Source):
            raise FallowError(
                "run.steps wants the DataLoader that run.prepare returned: loader = run.prepare(loader)", Exit.DATA
            )
        body = self._call = self._loop.steps(loader, epochs, max_steps)
        try:
            with self._released_by_head():
                yield from body
        finally:
            body.close()

    @contextlib.contextmanager
    def _released_by_head(self) -> Iterator[None]:
        """What the head decides about this worker, in the words of the script's side."""
        try:
            yield
        except SwitchedOut:
            self._released = True
            raise Released from None
        except Dismissed as dismissed:
            self._released = True
            if dismissed.code == 0:
                raise Released from None
            raise FallowError(dismissed.reason, _code(dismissed.code)) from None

    def epochs(self, n: int) -> Iterator[int]:
        """`for epoch in run.epochs(n)`: as `range(n)`, but a newcomer starts at the epoch that the members are in."""
        return self._place.epochs(n, self._epoch_hint, self._end_call)

    def _end_call(self) -> None:
        with self._released_by_head():
            self._loop.end_call()

    def _between(self) -> None:
        """Something acts behind a loop that was left by a break: who is a step behind must get the state without that.

        An exception on its way waits for nobody.
        """
        if self._loop.left and sys.exc_info()[0] is None:
            self._end_call()

    def _epoch_hint(self) -> int:
        return 0 if self._welcome is None else self._welcome.epoch

    # ------------------------------------------------------------------------------------------------ facts

    @property
    def rank(self) -> int:
        """Place of this member in the current generation, 0-based."""
        return self._member.group.rank

    @property
    def size(self) -> int:
        """Members of the current generation."""
        return self._member.group.size

    @property
    def generation(self) -> int:
        """Number of the current membership; 0 in a fixed world and before the first one."""
        return self._member.group.generation

    @property
    def step(self) -> int:
        """Finished optimizer steps since the run began: in a body, the number (0-based) of the step at work."""
        return self._place.position.step

    @property
    def epoch(self) -> int:
        """Current epoch, 0-based."""
        return self._place.epoch

    @property
    def deadline(self) -> float | None:
        """Seconds until this node goes away; None: unknown or never."""
        return self._session.deadline_in_s if self._session is not None else None

    @property
    def is_main(self) -> IsMain:
        """True on the one member that should print and write files.

        The value is looked up whenever it is asked for, so `main = run.is_main` may stand before the loop.
        """
        return self._is_main

    def _speaks(self) -> bool:
        if self._released or self._loop.step.rehearsing:
            return False
        if self._session is None or self._place.joined:
            return self._member.group.rank == 0
        return self._session.is_main

    @property
    def final_shard(self) -> bool:
        """True in the last body of a step on this member: gradients are there after backward, steps act.

        After a backward it is False if the step is void and will be done again: a member was lost in it, say. Then
        there are no gradients either.
        """
        return self._loop.step.final_shard and not self._member.reducer.interrupted

    def phase(self, name: str) -> bool:
        """For steps in which one part has to see the optimizer steps of the part before it, as in a GAN.

            for real in run.steps(loader):
                if run.phase("discriminator"):
                    ...; loss.backward(); opt_d.step(); opt_d.zero_grad()
                if run.phase("generator"):
                    ...; loss.backward(); opt_g.step(); opt_g.zero_grad()

        All shards of a step go through the first phase, then through the next one, with the same batches. Code outside
        the `if`s runs once in each phase, from the same random numbers; `run.final_shard` and `run.mean` are per phase.

        Args:
            name: of the phase; every body asks for the same names in the same order.

        Returns:
            True if the body at work has to do this phase.

        Raises:
            FallowError: outside a body, out of order, or a backward is outside of the phases.
        """
        return self._loop.step.phases.ask(name)

    @property
    def seed(self) -> int:
        """The run's seed: the same on all members and for the life of the run."""
        return self._seed

    # ------------------------------------------------------------------------------------------------ together

    def log(self, **scalars: float) -> None:
        """Show figures in `fallow status` and the monitor; counts in the final body on the main member."""
        if self._session is None or not self.is_main or (self._gate.in_body and not self._loop.step.final_shard):
            return
        known = self._session.progress.scalars
        self._session.progress.scalars = {**known, **{name: float(value) for name, value in scalars.items()}}

    def mean(self, x: float | torch.Tensor) -> float:
        """The step's mean of a metric over all samples.

        In a void body: this member's part so far. In the final body (all members must call it there): the sum of
        weight x value over all shards of the step; a body that was left out (`continue`) counts as 0. Asked for in
        final bodies only, as after an evaluation, and outside `steps`: the plain mean over the members.

        If a member dies in the middle of it, the step is done again; after something has acted in this body, such as
        an optimizer's step, it is NaN on all members that are left, or the value with the state of those who have it.

        Raises:
            FallowError: some bodies have asked for it and others not.
        """
        step = self._loop.step
        value = float(x.detach() if isinstance(x, torch.Tensor) else x)
        if step.rehearsing:
            return value
        if not self._gate.in_body:
            with self._released_by_head():
                return self._loop.together(Kind.MEAN, value)
        slot = step.means.note(step.shard, step.weight * value if step.weight else None)
        return self._in_final(slot, value) if self._loop.step.final_shard else value

    def barrier(self) -> None:
        """Wait for all members; in a void body it does nothing."""
        if self._loop.step.rehearsing:
            return
        if not self._gate.in_body:
            with self._released_by_head():
                self._loop.together(Kind.BARRIER, 0.0)
        elif self._loop.step.final_shard:
            self._in_final(None, 0.0)

    def _in_final(self, slot: int | None, value: float) -> float:
        """A call in the final body: `slot` says which mean of the body it is, None that it is a barrier."""
        step = self._loop.step
        if step.means.unanswered:
            told = self._gathered(step.means.tell(slot, value, step.shards, trains=step.trains))
            if told is not None:
                try:
                    step.means.answer(told)
                except FallowError as error:
                    raise self._gate.refuse(f"step {self.step}: {error.message}") from None
            elif self._gate.acted:
                self._place.doubtful = True
            else:
                step.void()
        result = step.means.result()
        if result is not None:
            return result
        # The body is void, or nobody may have a value of his own from here on.
        return math.nan if self._place.doubtful else value

    def _gathered(self, cells: torch.Tensor) -> list[torch.Tensor] | None:
        # All parts, for an exact sum: who computed which shard does not show in the last bit. Gathered, not reduced:
        # if others are in the step's reduction by mistake, gloo takes neither for a part of the other.
        progress = self._session.progress if self._session is not None else None
        if progress is not None:
            progress.in_mean = True
        try:
            told = self._member.group.all_gather(cells)
            self._member.group.wait()
        except Interrupted:
            return None
        finally:
            if progress is not None:
                progress.in_mean = False
        return told

    def checkpoint(self) -> None:
        """Ask for a durable checkpoint of this step, written in the background; one member that asks is enough.

        While the one before is being written, the next step that can take it does. Without a head there is no folder
        of the run: nothing happens.
        """
        if self._member.saver is not None and not self._loop.step.rehearsing:
            self._member.saver.asked = True

    def on_resize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Decorator: call this after each change of the membership, before the next step."""
        self._member.on_resize.append(callback)
        return callback

    # ------------------------------------------------------------------------------------------------ the end

    def _finished(self) -> int | None:
        """The script has ended; returns the exit code of who has left the run, None: the script's own."""
        session = self._session
        if self._released:
            return 0
        # In which the script did what comes after the loop. The end of a loop that it left by break may need another.
        generation = self.generation
        if self._call is not None:
            self._call.close()  # it may be one that nobody has taken to its end
        try:
            with self._released_by_head():
                self._loop.end_call(script=True)
            if self._place.astray:
                raise self._place.stranger()
        except Released:
            return 0
        except EndedAlone:
            # Whether it wanted to is told by its exit code.
            if session is not None:
                step = self._place.position.step
                deserted = Deserted(worker=session.worker, generation=self.generation, step=step)
                session.deliver(deserted, _DELIVERY_S)
                session.close()
            return None
        self._member.ledger.flush(LAST_S)
        if session is None or not self._place.joined:
            return None
        if self._member.saver is not None:
            self._member.saver.end()
        at = self._place.position
        session.deliver(
            Finished(
                worker=session.worker,
                generation=generation,
                steps=at.step,
                digest=state.digest([module.state_dict() for module in self._prepared.modules]),
                loss=at.loss,
                samples=at.samples,
                repeated=self._prepared.arithmetic.repeated,
                agreed=self._place.agreed,
                answer=self._place.answer,
            ),
            self._last_word_s(),
        )
        session.close()
        return None

    def _last_word_s(self) -> float:
        """Nobody else has the result: a head that is away is waited for, as it would be in a broken generation."""
        return self._welcome.head_patience_s if self._welcome is not None else _DELIVERY_S

    def _failed(self, code: int, message: str, trace: str, signature: str) -> None:
        session, place = self._session, self._place
        if session is None or self._released:
            return
        decides = place.joined and not self._gate.in_body and bool(self.is_main)
        self._released = True
        failed = Failed(
            worker=session.worker,
            code=code,
            message=message,
            traceback=trace[-100_000:],
            signature=signature,
            step=session.progress.step,
            outcome=Outcome(generation=self.generation, agreed=place.agreed, answer=place.answer)
            if place.joined
            else None,
        )
        session.deliver(failed, self._last_word_s() if decides else _DELIVERY_S)

    def _advice(self, error: BaseException) -> str:
        if isinstance(error, ValueError) and any(words in str(error) for words in _NO_GROUP):
            return (
                "Fallow makes no process group for torch.distributed, since none could follow the membership: leave "
                "init_process_group and what needs it out. backward() sums gradients by itself; use run.rank and "
                "run.size, run.mean(x) for a metric, run.barrier() for a barrier"
            )
        if isinstance(error, AttributeError) and (advice := self._advice_on(error.name, error.obj)):
            return advice
        missing = isinstance(error, (AttributeError, TypeError)) and "NoneType" in str(error)
        if not missing or not self._loop.step.left_void:
            return ""
        return (
            "If that is a gradient: in a body that is not the step's last one on this member parameters have none "
            "(.grad is None); look at them under `if run.final_shard:`"
        )

    def _advice_on(self, name: str | None, thing: Any) -> str:
        """What scripts for other runtimes ask of a model or a loader."""
        if name in ("module", "no_sync") and any(thing is module for module in self._prepared.modules):
            return (
                "run.prepare gives back the model itself and no wrapper, so there is no .module to take; nor is there "
                "a no_sync(): gradients are summed once in each step, over all of its bodies"
            )
        if name in ("sampler", "set_epoch") and isinstance(thing, Source):
            return "Leave set_epoch out: the order of samples is another one in each epoch by itself"
        return ""

    def _ends_at_once(self) -> bool:
        """Under a head always: torch's teardown takes seconds on a busy node, and somebody may be waiting for it."""
        if self._session is not None:
            return True
        group = self._member.group
        if group.broken is None:
            group.destroy()  # nothing is pending in it, and gloo ends badly if the interpreter goes first
        return group.abandoned


def _code(code: int) -> Exit:
    try:
        return Exit(code)
    except ValueError:
        return Exit.SOFTWARE


def init() -> Run:
    """Begin: connect to the head if an agent started this process, else set up an ordinary fixed world.

    Raises:
        FallowError: the head refused this worker or does not answer; the environment is contradictory.
    """
    worker = os.environ.get("FALLOW_WORKER")
    if "FALLOW_RESTART" in os.environ:
        raise FallowError(
            "the script calls fallow.init, so it follows the membership by itself: leave --restart (or torchrun) out, "
            "fallow run -- python SCRIPT",
            Exit.USAGE,
        )
    if worker is None:
        world = fixed.world_from_environment()
        fixed.check_own_group(world)
        run = Run(None, None, fixed.build_world(world))
        _install_ending(run)
        return run
    process.die_with_parent()
    process.tell_stacks()
    process.leave_sigterm_to_the_head()
    secret = process.read_secret(int(os.environ.get("FALLOW_CHANNEL_FD", "-1")))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

    address, ports = process.listens_on(secret)
    session = Session(worker, address, connection(secret), ports=ports)
    process.leave_sigterm_to_the_head(session.warn)
    return attach(session)


def attach(session: Session) -> Run:
    """A run over an open conversation; `init` for tests and tools that bring their own channel."""
    run = Run(session, session.open(), None)
    _install_ending(run)
    return run


def _install_ending(run: Run) -> None:
    process.Ending(run._finished, run._failed, run._ends_at_once, run._advice).install()


__all__ = ["Released", "Run", "init"]
