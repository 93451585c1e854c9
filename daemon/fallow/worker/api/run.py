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
from fallow.worker.data.ledger import FINISH_PATIENCE_S
from fallow.worker.data.loader import ElasticLoader, check_loader
from fallow.worker.data.source import FunctionSource, Source
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
"""Number of logged scalars that are shown: those with the newest names."""

_LONGEST_NAME = 200
"""Longest name of a logged scalar, in characters."""

_LONGEST_TEXT, _LONGEST_SIGNATURE = 100_000, 1_000
"""Longest message, and longest signature, of a reported error, in characters."""

_NO_GROUP = ("env:// rendezvous", "Default process group has not been initialized")
"""Parts of torch.distributed's error messages if no process group was initialized."""


class Run:
    """One elastic training run, seen from a script. Made by `fallow.init`.

    Args:
        session: open session with the head; None in a fixed world.
        group: group of the fixed world; None under a head.
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
        self._is_main = IsMain(self._is_main_now)
        self._call: Generator[Update, None, None] | None = None
        "current or last call of run.updates"
        watch_steps(self._prepared, self._loop.check_step, self._loop.end_step)

    # ------------------------------------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, global_batch: int | None = None, reproducible: bool = False) -> Any:
        """Prepare models, optimizers, loaders, schedulers, scalers and all other objects that change during training.

        Args:
            objects: modules, optimizers, DataLoaders, random generators (of torch, numpy or `random`), and objects
                with state_dict and load_state_dict. Generators are seeded for each shard, also inside a data set.
            global_batch: samples of one optimizer step over all workers. Default: the loader's batch size times the
                run's maximum number of workers (or the fixed world's size).
            reproducible: make the final weights independent of the membership, bit for bit. Gradients are summed in
                a fixed order (see `fallow.worker.reduction.exact.Exact`), which takes more memory, and the process
                uses deterministic kernels. The run refuses new workers that would compute other bits (processor,
                threads, versions, settings). FALLOW_REPRODUCIBLE=1 has this effect, too.

        Returns:
            The objects in order, or the object itself if there is one. Each DataLoader is replaced by an elastic
            loader for `updates`.

        Raises:
            FallowError: an object cannot be prepared; the message says what to write instead.
        """
        if self._call is not None:
            raise FallowError("prepare everything before the first run.updates: members must agree on the state")
        if (reproducible or os.environ.get("FALLOW_REPRODUCIBLE") == "1") and not self._prepared.reproducible:
            self._prepared.arithmetic = Exact()
        results = [self._prepare_one(thing, global_batch) for thing in objects]
        if self._prepared.reproducible:
            enforce(self._prepared.devices())  # before the script captures graphs, which keep their kernels
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_one(self, thing: Any, global_batch: int | None) -> Any:
        if not isinstance(thing, DataLoader):
            self._prepared.add(thing)
            return thing
        check_loader(thing)
        assert thing.batch_size is not None
        kind = StreamLoader if isinstance(thing.dataset, IterableDataset) else ElasticLoader
        loader = kind(thing, self._member.seed, global_batch or thing.batch_size * self._max_workers)
        loader.generators = self._prepared.generators
        return loader

    # ------------------------------------------------------------------------------------------------ the loop

    def updates(
        self,
        source: Source | Callable[[], Any],
        *,
        shards: int = 1,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> Generator[Update, None, None]:
        """Iterate over optimizer steps of the whole global batch. The membership changes only between steps.

            for update in run.updates(loader):
                for batch in update:
                    loss_fn(model(batch)).backward()
                optimizer.step(); optimizer.zero_grad()

        The body of the inner loop runs once for each of this member's shards, and again if a member is lost. It must
        depend only on `update.step` and the batch. Code after the inner loop runs once per step on every member.

        Args:
            source: a prepared DataLoader, or a function that returns a batch (like nanoGPT's `get_batch`). The
                generators of torch, numpy and `random` are seeded for the shard before each call of the function.
            shards: batches in one step over all members. Only for a function; a DataLoader has its own number.
            epochs: number of passes over the data or the stream.
            max_steps: end after this number of steps of this call, unless the data end first.

        Raises:
            Released: this worker leaves the run (ends the process with code 0).
            FallowError: the members disagree, the head is lost, or the script makes a mistake.
        """
        if not isinstance(source, Source):
            if isinstance(source, DataLoader) or not callable(source):
                raise FallowError(
                    "run.updates wants the DataLoader that run.prepare returned, loader = run.prepare(loader), or a "
                    "function that gives a batch",
                    Exit.DATA,
                )
            source = FunctionSource(source, shards)
        elif shards not in (1, source.shards):
            raise FallowError(
                f"run.updates: shards={shards} is for a function that gives a batch; a step of this DataLoader has "
                f"{source.shards} shards: run.prepare(loader, global_batch=...) sets the samples of a step",
                Exit.USAGE,
            )
        self._call = self._loop.updates(source, epochs, max_steps)
        yield from self._call

    def steps(self, loader: Source, epochs: int = 1, max_steps: int | None = None) -> Iterator[Any]:
        """Iterate over the batches of this member's shards: the short loop, with one backward and one step per body.

        Prepared optimizers, schedulers, scalers and averages act only in this member's last body of a step. A body
        that this loop does not support raises an error; use `updates` for it.

        Args:
            loader: a prepared DataLoader.
            epochs: as for `updates`.
            max_steps: as for `updates`.

        Raises:
            Released: this worker leaves the run (ends the process with code 0).
            FallowError: as for `updates`; or a body needs `updates`.
        """
        return short.steps(self._loop, self._gate, self.updates(loader, epochs=epochs, max_steps=max_steps))

    def epochs(self, n: int) -> Iterator[int]:
        """Iterate over epochs like `range(n)`, but a new member starts at the members' current epoch."""
        session = self._session
        return self._place.epochs(
            n, lambda: 0 if session is None else session.head_status.last_reply.epoch, self._loop.end_call
        )

    # ------------------------------------------------------------------------------------------------ properties

    @property
    def rank(self) -> int:
        """0-based rank of this member in the current generation."""
        return self._member.group.rank

    @property
    def size(self) -> int:
        """Number of members of the current generation."""
        return self._member.group.size

    @property
    def generation(self) -> int:
        """Number of the current generation, that is, of the current membership; 0 before the first one."""
        return self._member.group.generation

    @property
    def step(self) -> int:
        """Number of finished optimizer steps of the run; during an update, the 0-based number of the update."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        """Current epoch, 0-based."""
        return self._loop.epoch

    @property
    def deadline(self) -> float | None:
        """Seconds until this node ends; None: unknown or never."""
        return self._session.head_status.ends_in_s if self._session is not None else None

    @property
    def is_main(self) -> IsMain:
        """True on the one member that should print and write files.

        The object looks up the value at each use, so `main = run.is_main` may stand before the loop.
        """
        return self._is_main

    def _is_main_now(self) -> bool:
        if self._generations.is_released or self._loop.is_rehearsing:
            return False
        if self._session is None or self._place.has_joined:
            return self._member.group.rank == 0
        return self._session.is_main

    @property
    def rehearsing(self) -> bool:
        """True in a new member's first update, on throw-away state. Skip outside effects that must happen once."""
        return self._loop.is_rehearsing

    @property
    def seed(self) -> int:
        """The run's seed. Equal on all members, and constant for the whole run."""
        return self._member.seed

    # ------------------------------------------------------------------------------------------------ collectives

    def log(self, **scalars: float) -> None:
        """Show scalars in `fallow status` and the monitor. Only the main member's scalars are shown."""
        if self._session is None or not self.is_main:
            return
        progress = self._session.progress
        logged = {clean(name, _LONGEST_NAME): float(value) for name, value in scalars.items()}
        all_scalars = {**progress.figures.scalars, **logged}
        # Limited: every heartbeat carries the scalars, and a script may use a new name in each step.
        progress.tell(scalars=dict(list(all_scalars.items())[-_MOST_SCALARS:]))

    def mean(self, x: float | torch.Tensor) -> float:
        """Return the unweighted mean of the members' values, for example of a shared evaluation.

        All members call this, outside of inner loops. A member that is lost meanwhile does not count.

        Raises:
            FallowError: the call is inside an inner loop (use `update.note`), or members are at different positions.
        """
        return self._loop.joint_call(Kind.MEAN, float(x.detach() if isinstance(x, torch.Tensor) else x))

    def barrier(self) -> None:
        """Wait for all members, outside of inner loops."""
        self._loop.joint_call(Kind.BARRIER, 0.0)

    def checkpoint(self) -> None:
        """Request a durable checkpoint, written in the background. A request of one member is enough.

        A request before the end of the inner loop saves the state after this step; a later request, after the next
        step. A step that leaves the loop over `run.updates` by `break` writes none: use `max_steps` instead. While
        another checkpoint is being written, the request waits. Without a head nothing happens.
        """
        if self._member.saver is not None and not self._loop.is_rehearsing:
            self._member.saver.is_requested = True

    def on_resize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Decorator: call `callback` after each membership change, before the next step. It may not use `run.mean`."""
        self._on_resize.append(callback)
        return callback

    # ------------------------------------------------------------------------------------------- end of the process

    def _finish(self) -> int | None:
        """Report the end of the script. Returns 0 if this worker has left the run; None: the script's own exit code."""
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
        # Read first: closing a loop that the script left by `break` may need a later generation.
        generation = self.generation
        if self._call is not None:
            self._call.close()  # the script may not have finished the loop
        try:
            self._loop.end_call(script=True)
            if self._place.is_astray:
                raise self._place.stranger_error()
        except Released:
            return 0
        except ScriptEndedEarly:
            # The exit code shows whether the script ended on purpose.
            if session is not None:
                session.say(deserted=True)
            return None
        self._member.ledger.flush(FINISH_PATIENCE_S)
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

    def _report_failure(self, code: int, message: str, trace: str, signature: str) -> None:
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
        """Return advice for an exception of a script that was written for another runtime; empty: none."""
        if isinstance(error, ValueError) and any(words in str(error) for words in _NO_GROUP):
            return (
                "Fallow makes no process group for torch.distributed, since its size cannot change. Remove "
                "init_process_group and all calls that need it. backward() sums gradients by itself; use run.rank and "
                "run.size, run.mean(x) for a metric, run.barrier() for a barrier"
            )
        return ""

    def _ends_at_once(self) -> bool:
        """Return True if the process should skip torch's teardown: it takes seconds, and Slurm may need the node."""
        if self._session is not None:
            return True
        group = self._member.group
        if group.broken is not None:
            return group.size > 1  # native threads may still hold abandoned collectives
        group.destroy()  # nothing is pending, and gloo may crash if the interpreter ends first
        return False


def init() -> Run:
    """Connect to the head if an agent started this process; otherwise set up an ordinary fixed world.

    Raises:
        FallowError: the head refused this worker or does not answer, or environment variables contradict each other.
    """
    if "FALLOW_RESTART" in os.environ:
        raise FallowError(
            "the script calls fallow.init, so it needs no restarts. Start it without --restart and without torchrun: "
            "fallow run -- python SCRIPT",
            Exit.USAGE,
        )
    if "FALLOW_WORKER" not in os.environ:
        run = Run(None, fixed.build_world(fixed.world_from_environment()))
        process.Ending(run)
        return run
    channel = os.environ.get("FALLOW_CHANNEL_FD", "-1")
    if is_child_of_agent(channel):
        process.die_with_parent()  # only without a shell between: SIGTERM ends the shell and must not end this process
    process.enable_stack_dumps()
    process.leave_sigterm_to_the_head()
    session = process.session_with_agent(channel)
    process.leave_sigterm_to_the_head(session.head_status.warn)
    return attach(session)


def attach(session: Session) -> Run:
    """Make a run over a session that is not open yet: `init` for tests and tools with their own channel."""
    session.open()
    run = Run(session, None)
    process.Ending(run)
    return run


__all__ = ["Released", "Run", "init"]
