"""The public API: `fallow.init`, `Run`, `Released`."""

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fallow.core.membership.messages import Fault, Finish, Outcome
from fallow.model import Exit, FallowError
from fallow.text import clean, clean_output
from fallow.wire.frames import is_child_of_agent
from fallow.worker.api import fixed, process, short
from fallow.worker.data.ledger import LAST_S
from fallow.worker.data.loader import ElasticLoader, check_loader
from fallow.worker.data.source import Calls, Source
from fallow.worker.data.stream_loader import StreamLoader
from fallow.worker.guards.watch import watch_steps
from fallow.worker.loop.exchange import Kind
from fallow.worker.loop.generations import Released
from fallow.worker.loop.meeting import ScriptEndedEarly
from fallow.worker.loop.member import Member
from fallow.worker.loop.update import Update
from fallow.worker.loop.updates import Loop
from fallow.worker.prepared import state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.prepared.signature import enforce
from fallow.worker.reduction.exact import Exact
from fallow.worker.session.session import Session
from fallow.worker.session.status import IsMain
from fallow.worker.transport.group import Group

_MOST_SCALARS = 1_000
"""Figures that are shown, the newest names."""

_LONGEST_NAME = 200
"""Characters of a figure's name."""

_LONGEST_TEXT, _LONGEST_SIGNATURE = 100_000, 1_000
"""Characters of what is told of an error."""

_NO_GROUP = ("env:// rendezvous", "Default process group has not been initialized")
"""In what torch.distributed says where nobody has told it of a fixed world."""


class Run:
    """One elastic training, seen from a script. Made by `fallow.init`.

    Under a head it has a `session`, which is open; in a fixed world a `group`.
    """

    def __init__(self, session: Session | None, group: Group | None) -> None:
        self._session = session
        self._prepared = Prepared()
        self._gate = short.Gate()
        self._member = Member(self._prepared, session, group)
        self._max_workers = session.setup.max_workers if session is not None else self._member.group.size
        self._place = self._member.place
        self._on_resize: list[Callable[[], None]] = []
        self._loop = Loop(self._member, self._on_resize)
        self._generations = self._loop.generations
        self._is_main = IsMain(self._speaks)
        self._call: Generator[Update, None, None] | None = None
        "the run.updates call at work, or the last one"
        watch_steps(self._prepared, self._loop.check_step, self._loop.end_step)

    # ------------------------------------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, global_batch: int | None = None, reproducible: bool = False) -> Any:
        """Take over models, optimizers, loaders, schedulers, scalers and whatever else has a state.

        Args:
            objects: modules, optimizers, DataLoaders, generators of random numbers (of torch, numpy or `random`:
                each body finds them seeded for its shard, and so does a data set that holds them), and objects with
                state_dict and load_state_dict.
            global_batch: samples of one optimizer step, whoever computes them; default: the loader's batch size
                times the run's maximum number of workers (or the fixed world's size).
            reproducible: the same final weights, bit for bit, whoever computes which shard: gradients are summed in
                one order (see `fallow.worker.reduction.exact.Exact`), which takes more memory; deterministic kernels
                are chosen for the whole process. Newcomers that would compute other bits (processor, threads, versions,
                settings) are refused. FALLOW_REPRODUCIBLE=1 does the same.

        Returns:
            The objects in the same order (a single one by itself): the same ones, except that a DataLoader is
            replaced by an elastic one for `updates`.

        Raises:
            FallowError: an object cannot be prepared; the text says what to write instead.
        """
        if self._call is not None:
            raise FallowError("prepare everything before the first run.updates: members must agree on the state")
        if (reproducible or os.environ.get("FALLOW_REPRODUCIBLE") == "1") and not self._prepared.reproducible:
            self._prepared.arithmetic = Exact()
        done = [self._prepare_one(thing, global_batch) for thing in objects]
        if self._prepared.reproducible:
            enforce(self._prepared.devices())  # before the script makes graphs, which keep their kernels
        return done[0] if len(done) == 1 else tuple(done)

    def _prepare_one(self, thing: Any, global_batch: int | None) -> Any:
        if not isinstance(thing, DataLoader):
            self._prepared.add(thing)
            return thing
        check_loader(thing)
        assert thing.batch_size is not None
        kind = StreamLoader if isinstance(thing.dataset, IterableDataset) else ElasticLoader
        made = kind(thing, self._member.seed, global_batch or thing.batch_size * self._max_workers)
        made.generators = self._prepared.generators
        return made

    # ------------------------------------------------------------------------------------------------ the loop

    def updates(
        self,
        source: Source | Callable[[], Any],
        *,
        shards: int = 1,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> Generator[Update, None, None]:
        """Optimizer steps of the whole global batch; between them is the only place where the membership changes.

            for update in run.updates(loader):
                for batch in update:
                    loss_fn(model(batch)).backward()
                optimizer.step(); optimizer.zero_grad()

        What stands inside the inner loop runs once for each of this member's shards, and again if a member is lost:
        it must be a function of `update.step` and the batch. What stands behind it runs once per step on every member.

        Args:
            source: a DataLoader that went through `prepare`, or a function that gives a batch (as nanoGPT's
                `get_batch`), which is called with torch's, numpy's and `random`'s generators seeded for the shard.
            shards: of such a function: batches of one step, whoever computes them.
            epochs: passes over the data, or over the stream.
            max_steps: end after so many steps of this call, if that comes first.

        Raises:
            Released: this worker leaves the run (ends the process with code 0).
            FallowError: the members disagree, or the head is gone for good; the script does what cannot be right.
        """
        if not isinstance(source, Source):
            if isinstance(source, DataLoader) or not callable(source):
                raise FallowError(
                    "run.updates wants the DataLoader that run.prepare returned, loader = run.prepare(loader), or a "
                    "function that gives a batch",
                    Exit.DATA,
                )
            source = Calls(source, shards)
        self._call = self._loop.updates(source, epochs, max_steps)
        yield from self._call

    def steps(self, loader: Source, epochs: int = 1, max_steps: int | None = None) -> Iterator[Any]:
        """Batches of this member's shards, for bodies of one backward with `optimizer.step()` behind it.

        Prepared optimizers, schedulers, scalers and averages act in a step's last body on this member only. What this
        cannot do it refuses; `updates` can.

        Args:
            loader: a DataLoader that went through `prepare`.
            epochs: as for `updates`.
            max_steps: likewise.

        Raises:
            Released: this worker leaves the run (ends the process with code 0).
            FallowError: as for `updates`; or a body needs the loop in two levels.
        """
        return short.steps(self._loop, self._gate, self.updates(loader, epochs=epochs, max_steps=max_steps))

    def epochs(self, n: int) -> Iterator[int]:
        """`for epoch in run.epochs(n)`: as `range(n)`, but a newcomer starts at the epoch that the members are in."""
        session = self._session
        return self._place.epochs(
            n, lambda: 0 if session is None else session.head_status.last_reply.epoch, self._loop.end_call
        )

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
        """Finished optimizer steps since the run began: in an update, its number (0-based)."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        """Current epoch, 0-based."""
        return self._loop.epoch

    @property
    def deadline(self) -> float | None:
        """Seconds until this node goes away; None: unknown or never."""
        return self._session.head_status.ends_in_s if self._session is not None else None

    @property
    def is_main(self) -> IsMain:
        """True on the one member that should print and write files.

        The value is looked up whenever it is asked for, so `main = run.is_main` may stand before the loop.
        """
        return self._is_main

    def _speaks(self) -> bool:
        if self._generations.is_released or self._loop.is_rehearsing:
            return False
        if self._session is None or self._place.has_joined:
            return self._member.group.rank == 0
        return self._session.is_main

    @property
    def rehearsing(self) -> bool:
        """A newcomer's first update, on throw-away state: for what must not happen twice outside of the run."""
        return self._loop.is_rehearsing

    @property
    def seed(self) -> int:
        """The run's seed: the same on all members and for the life of the run."""
        return self._member.seed

    # ------------------------------------------------------------------------------------------------ together

    def log(self, **scalars: float) -> None:
        """Show figures in `fallow status` and the monitor; those of the main member count."""
        if self._session is None or not self.is_main:
            return
        progress = self._session.progress
        logged = {clean(name, _LONGEST_NAME): float(value) for name, value in scalars.items()}
        known = {**progress.figures.scalars, **logged}
        # They go with every heartbeat, and a script may have made a name for each step.
        progress.tell(scalars=dict(list(known.items())[-_MOST_SCALARS:]))

    def mean(self, x: float | torch.Tensor) -> float:
        """The plain mean of the members' values: of an evaluation that each does a part of, say.

        All members call it, outside of inner loops. Whoever is lost meanwhile does not count.

        Raises:
            FallowError: inside an inner loop (`update.note` is for that), or the members are at different places.
        """
        return self._loop.joint_call(Kind.MEAN, float(x.detach() if isinstance(x, torch.Tensor) else x))

    def barrier(self) -> None:
        """Wait for all members, outside of inner loops."""
        self._loop.joint_call(Kind.BARRIER, 0.0)

    def checkpoint(self) -> None:
        """Ask for a durable checkpoint, written in the background; one member that asks is enough.

        Asked for before the inner loop ends, it holds the step at work; behind the inner loop, the next step. A step
        whose loop over `run.updates` is left by `break` writes none: end the loop with `max_steps` instead.
        While the one before is being written, the next step that can take it does. Without a head there is no folder
        of the run: nothing happens.
        """
        if self._member.saver is not None and not self._loop.is_rehearsing:
            self._member.saver.asked = True

    def on_resize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Decorator: call this after each change of the membership, before the next step; no `run.mean` in it."""
        self._on_resize.append(callback)
        return callback

    # ------------------------------------------------------------------------------------------------ the end

    def _finished(self) -> int | None:
        """The script has ended; returns the exit code of who has left the run, None: the script's own."""
        session = self._session
        try:
            return self._end_script()
        finally:
            if session is not None:
                session.close()

    def _end_script(self) -> int | None:
        session = self._session
        if self._generations.is_released:
            return 0
        # In which the script did what comes after the loop. The end of a loop that it left by break may need another.
        generation = self.generation
        if self._call is not None:
            self._call.close()  # it may be one that nobody has taken to its end
        try:
            self._loop.end_call(script=True)
            if self._place.is_astray:
                raise self._place.stranger_error()
        except Released:
            return 0
        except ScriptEndedEarly:
            # Whether it wanted to is told by its exit code.
            if session is not None:
                session.say(deserted=True)
            return None
        self._member.ledger.flush(LAST_S)
        if session is None or not self._place.has_joined:
            return None
        if self._member.saver is not None:
            self._member.saver.end()
        at = self._place.position
        finish = Finish(
            generation=generation,
            steps=at.step,
            digest=state.digest([module.state_dict() for module in self._prepared.modules]),
            loss=at.loss,
            samples=at.samples,
            repeated=self._member.reduction.repeated_sums,
            agreed=at.op,
            answer=self._loop.meeting.answer,
        )
        session.say(finish=finish)
        return None

    def _failed(self, code: int, message: str, trace: str, signature: str) -> None:
        session, place = self._session, self._place
        if session is None or self._generations.is_released:
            return
        self._generations.is_released = True
        answer = self._loop.meeting.answer
        fault = Fault(
            code=code,
            message=clean_output(message, _LONGEST_TEXT),
            traceback=clean_output(trace[-_LONGEST_TEXT:], 2 * _LONGEST_TEXT),
            signature=clean(signature, _LONGEST_SIGNATURE),
            step=session.progress.step,
            outcome=Outcome(generation=self.generation, agreed=place.position.op, answer=answer)
            if place.has_joined
            else None,
        )
        session.say(fault=fault)
        session.close()

    def _advice(self, error: BaseException) -> str:
        """What to tell of an exception in a script that was written for another runtime; empty: nothing."""
        if isinstance(error, ValueError) and any(words in str(error) for words in _NO_GROUP):
            return (
                "Fallow makes no process group for torch.distributed, since none could follow the membership: leave "
                "init_process_group and what needs it out. backward() sums gradients by itself; use run.rank and "
                "run.size, run.mean(x) for a metric, run.barrier() for a barrier"
            )
        return ""

    def _ends_at_once(self) -> bool:
        """Under a head always: torch's teardown takes seconds on a busy node, and somebody may be waiting for it."""
        if self._session is not None:
            return True
        group = self._member.group
        if group.broken is not None:
            return group.size > 1  # native threads may still hold on to collectives that were left behind
        group.destroy()  # nothing is pending in it, and gloo ends badly if the interpreter goes first
        return False


def init() -> Run:
    """Begin: connect to the head if an agent started this process, else set up an ordinary fixed world.

    Raises:
        FallowError: the head refused this worker or does not answer; the environment is contradictory.
    """
    if "FALLOW_RESTART" in os.environ:
        raise FallowError(
            "the script calls fallow.init, so it follows the membership by itself: leave --restart (or torchrun) out, "
            "fallow run -- python SCRIPT",
            Exit.USAGE,
        )
    if "FALLOW_WORKER" not in os.environ:
        run = Run(None, fixed.build_world(fixed.world_from_environment()))
        process.Ending(run)
        return run
    channel = os.environ.get("FALLOW_CHANNEL_FD", "-1")
    if is_child_of_agent(channel):
        process.die_with_parent()  # Slurm's SIGTERM ends a shell, and must not end this process with it
    process.tell_stacks()
    process.leave_sigterm_to_the_head()
    session = process.session_with_agent(channel)
    process.leave_sigterm_to_the_head(session.head_status.warn)
    return attach(session)


def attach(session: Session) -> Run:
    """A run over a session that is not open yet; `init` for tests and tools that bring their own channel."""
    session.open()
    run = Run(session, None)
    process.Ending(run)
    return run


__all__ = ["Released", "Run", "init"]
