"""The loop: bodies, steps and the turns at which the membership changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from fallow.core.shards import Duty, duties, mix
from fallow.model import Active, Checkpointed, FallowError, Left, Parts, Welcome, WorkerReady
from fallow.worker import checkpoint, rng
from fallow.worker.capture import backward_seen
from fallow.worker.control import StepPlan
from fallow.worker.group import Group, Interrupted
from fallow.worker.ledger import Done, Fed, Ledger, Start
from fallow.worker.loader import ElasticLoader, Key
from fallow.worker.position import Position
from fallow.worker.prepared import Gate, Prepared, signature_of
from fallow.worker.reducer import Reducer
from fallow.worker.session import Prepared as Upcoming
from fallow.worker.session import Session
from fallow.worker.switch import exchange, export_state


class SwitchedOut(Exception):
    """This worker is not in the new generation. Turned into `fallow.Released` by the public API."""


class Loop:
    """Drives bodies over shards and switches generations between steps.

    Args:
        prepared: the objects of `run.prepare`.
        gate: what prepared objects ask before they act.
        seed: the run's seed.
        session: the conversation with the head; None in a fixed world.
        welcome: what the head said; None in a fixed world.
        group: the fixed world's group, or None under a head.
    """

    def __init__(
        self,
        prepared: Prepared,
        gate: Gate,
        seed: int,
        session: Session | None,
        welcome: Welcome | None,
        group: Group | None,
    ) -> None:
        self.prepared = prepared
        self.gate = gate
        self.seed = seed
        self.session = session
        self.welcome = welcome
        self.group = group or Group(0, 0, 1, None)
        self.position = Position()
        self.final_shard = False
        self.rehearsing = False
        self.joined = False
        "it has taken part in a first exchange"
        self.in_sync = session is None
        "the script has reached the place that `position` names"
        self.wrong_epoch = False
        "run.epochs handed out another epoch than the members are in"
        self.epoch_entered: tuple[int, int] | None = None
        "(number of the run.epochs loop, epoch) that the script is in"
        self.epochs_in_loop = 1
        "epochs of the run.epochs loop that the script is in"
        self.loops = 0
        "run.epochs loops that the script has begun"
        self.calls = 0
        "run.steps calls that the script has begun"
        self.checkpoint_asked = False
        self.on_resize: list[Callable[[], None]] = []
        self.slots: list[dict[int, float]] = []
        "run.mean: weight x value by shard, for each call in a body, in order"
        self.shards = 1
        "shards in the step at work"
        self.shard = 0
        self.weight = 0.0
        self._reducer: Reducer | None = None
        self._loader: ElasticLoader | None = None
        self._arrival: _Arrival | None = None
        self._boundary = time.monotonic()
        self._discarded = 0
        self._speed = 0.0
        path = Path(welcome.folder) / "ledger" / f"{session.worker}.ledger" if session and welcome else None
        self._ledger = Ledger(path)

    # ------------------------------------------------------------------------------------------------ run.steps

    def steps(self, loader: ElasticLoader, epochs: int, max_steps: int | None) -> Generator[Any, None, None]:
        """Bodies of one `run.steps` call, see `Run.steps`."""
        call = self.calls
        self.calls += 1
        self._loader = loader
        if self._reducer is None:
            self._reducer = self._make_reducer()
        with backward_seen(self._before_backward, self._after_backward):
            try:
                if not self.joined:
                    if self.session is not None:
                        yield from self._rehearse(loader)
                        self._announce(loader, epochs, max_steps)
                    call = self._join(call)
                if self.wrong_epoch or call < self.position.call:
                    self._report_arrival()
                    return  # the members are past this call
                self.in_sync = True
                while self._wants_more(epochs, max_steps):
                    yield from self._step(loader)
                    self._turn()
                self._report_arrival()
                self.position.finish_call()
                self._ledger.flush()
            except GeneratorExit:
                # The user's `break`, which all members must do after the same final body.
                self._report_arrival()
                self.position.finish_call()
                raise
            finally:
                self.final_shard = False
                self.gate.in_body = False
                self.gate.open = self.in_sync and not self.wrong_epoch
                rng.seed_everything(mix(self.seed, "between", self.position.step))

    def _wants_more(self, epochs: int, max_steps: int | None) -> bool:
        at = self.position
        return at.passes < epochs and (max_steps is None or at.call_steps < max_steps)

    def _make_reducer(self) -> Reducer:
        reducer = Reducer(self.prepared.parameters(), self.prepared.buffers())
        reducer.flags = self._flags
        reducer.before_control = self._ledger.flush
        return reducer

    def _flags(self) -> tuple[bool, bool]:
        if self.session is None:
            return False, self.checkpoint_asked
        return self.session.switch_committed, self.checkpoint_asked or self.session.checkpoint_wanted

    # ------------------------------------------------------------------------------------------------ one step

    def _duties(self, shards: int) -> list[Duty]:
        return duties(shards, self.group.rank, self.group.size)

    def _shards(self, shards: int) -> list[int]:
        return [duty.shard for duty in self._duties(shards)]

    def _step(self, loader: ElasticLoader) -> Iterator[Any]:
        at, layout, reducer, gate = self.position, loader.layout, self._the_reducer, self.gate
        began = time.monotonic()
        samples, shards = layout.samples_in(at.index), layout.shards_in(at.index)
        keys = [Key(at.data_epoch, at.index, shard) for shard in range(shards)]
        crcs = [loader.crc(key) for key in keys]
        mine = self._duties(shards)
        reducer.begin_step(StepPlan(at.step, samples, sum(crcs), shards))
        self.slots = []
        self.shards = shards
        before = [buffer.detach().clone() for buffer in self.prepared.buffers()]
        for number, (shard, counts) in enumerate(mine):
            if number:
                self._restore(before)
            batch = loader.fetch(keys[shard], self._shards)
            rng.seed_everything(mix(self.seed, "body", at.step, shard))
            first, end = layout.bounds(at.index, shard)
            self.weight = (end - first) / samples if counts else 0.0
            self.final_shard = number == len(mine) - 1
            self.shard = shard
            reducer.begin_body(shard, self.weight, final=self.final_shard, live=True)
            if counts:
                reducer.samples += end - first
                reducer.crc += crcs[shard]
                self._ledger.add(
                    Fed(
                        generation=self.group.generation,
                        epoch=at.data_epoch,
                        step=at.step,
                        shard=shard,
                        n=end - first,
                        total=samples,
                        crc=crcs[shard],
                    )
                )
            gate.open, gate.in_body, gate.stepped, gate.single = False, True, False, shards == 1
            self._report_arrival()
            try:
                yield batch
            except GeneratorExit:
                if self.final_shard and reducer.rounds and not reducer.interrupted:
                    self._finish(samples, layout.steps, began)
                raise
            del batch
            if self.group.broken is not None and not self.final_shard:
                break
            if shard == 0 and not self.final_shard:
                reducer.keep_buffers()
        else:
            if not reducer.rounds:
                self._reduce_without_backward()
        gate.in_body = False
        gate.open = True
        if reducer.rounds and not reducer.interrupted:
            self._finish(samples, layout.steps, began)
            return
        self._discarded += 1
        self._ledger.drop_fed()
        self._restore(before)
        for _, parameter in self.prepared.parameters():
            parameter.grad = None

    def _finish(self, samples: int, steps_in_pass: int, began: float) -> None:
        at = self.position
        self._boundary = time.monotonic()
        self._ledger.add(Done(generation=self.group.generation, step=at.step))
        at.loss = self._the_reducer.loss
        at.finish_step(samples, steps_in_pass)
        took = self._boundary - began
        self._speed = samples / took if not self._speed else 0.9 * self._speed + 0.1 * samples / took
        if self.session is not None:
            progress = self.session.progress
            progress.step, progress.loss, progress.samples_per_s = at.step, at.loss, self._speed
            progress.epoch = self.epoch

    @property
    def epoch(self) -> int:
        """Epoch of run.epochs if the script is in such a loop, else passes over the data."""
        return self.epoch_entered[1] if self.epoch_entered is not None else self.position.data_epoch

    @property
    def _the_reducer(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    def _restore(self, buffers: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.prepared.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def _reduce_without_backward(self) -> None:
        """The final body ended without a backward: contribute what there is, and do the step that others do."""
        reducer = self._the_reducer
        reducer.before_backward()
        reducer.finish_round()
        if not reducer.rounds or not reducer.used:
            return
        self.gate.open = True
        scaler = self.prepared.scaler
        for optimizer in self.prepared.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()

    def _before_backward(self) -> None:
        if not self.gate.in_body:
            return
        if self.gate.stepped:
            raise FallowError(
                "a backward after an optimizer's step in the same body would see other weights on a member with one "
                "shard than on one with several; write one run.steps loop per phase, or step once at the end"
            )
        self._the_reducer.before_backward()

    def _after_backward(self, root: Any) -> None:
        if not self.gate.in_body:
            return
        reducer = self._the_reducer
        if isinstance(root, torch.Tensor) and root.numel() == 1:
            scaler = self.prepared.scaler
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            reducer.add_loss(float(root.detach()) / scale)
        reducer.after_backward()
        self.gate.open = self.final_shard and reducer.rounds > 0 and not reducer.interrupted

    # ------------------------------------------------------------------------------------------------ turns

    def _turn(self) -> None:
        """Between two steps: write a checkpoint, change the generation, or neither."""
        reducer = self._the_reducer
        finished = reducer.control is not None and not reducer.interrupted
        if finished and reducer.checkpoint:
            self._save_checkpoint()
        planned = finished and reducer.switch == self.group.size
        if planned or self.group.broken is not None:
            self._switch(planned)

    def _save_checkpoint(self) -> None:
        self.checkpoint_asked = False
        if self.session is None or self.welcome is None:
            return
        self.session.checkpoint_done()
        if self.group.rank != 0:
            return
        at = self.position
        folder = Path(self.welcome.folder) / "checkpoints"
        tree = export_state(self.prepared, at)
        path, digest = checkpoint.save(folder, self.group.generation, at.step, at.loop_epoch, tree)
        self.session.send(Checkpointed(worker=self.session.worker, step=at.step, path=str(path), digest=digest))

    def _join(self, call: int) -> int:
        """Take part in the first generation of this worker; returns this run.steps call's number among the members'."""
        if self.session is None:
            try:
                self._enter(self.group, None, Parts())
            except Interrupted as error:
                raise FallowError(
                    f"the first exchange between the ranks failed: {error}; see the other ranks' output"
                ) from None
        else:
            self._boundary = time.monotonic()
            self._switch(planned=True)
        at = self.position
        if self.epoch_entered is None or self.session is None:
            return call
        # Inside run.epochs: the members' numbering counts from the epoch's first call.
        self.wrong_epoch = self.epoch_entered != (at.loop, at.loop_epoch)
        self.calls = at.loop_call + 1
        return at.loop_call

    def _switch(self, planned: bool) -> None:
        """Go over to the next committed generation, as often as it takes until one stands."""
        session = self.session
        if session is None:
            raise FallowError(
                f"the connection to another rank is lost ({self.group.broken}); a fixed world cannot go on: "
                "start it again, or run it under `fallow run`"
            )
        reached = time.monotonic()
        if not planned:
            session.hold(self.group.generation, self.group.broken or "interrupted")
        while True:
            upcoming = session.await_commit()
            taken = time.monotonic()
            if upcoming.group is None:
                self._leave(upcoming)
            else:
                parts = Parts(drain=reached - self._boundary, group=taken - reached)
                try:
                    self._enter(upcoming.group, upcoming.prepare.checkpoint, parts)
                    return
                except Interrupted as error:
                    session.hold(upcoming.prepare.generation, str(error))

    def _enter(self, group: Group, newest: str | None, parts: Parts) -> None:
        """First exchange of a generation, after which this worker computes in it."""
        if newest is None and self.welcome is not None:
            newest = self.welcome.checkpoint
        newcomer = not self.joined
        done = exchange(group, self.prepared, self.position, has_state=self.joined, newest=newest)
        self.group = group
        self.position = done.position
        self.joined = True
        self._the_reducer.attach(group)
        at = self.position
        self._ledger.add(Start(generation=group.generation, first_step=at.step))
        self._ledger.flush()
        if self._loader is not None:
            self._loader.replan(Key(at.data_epoch, at.index, 0), self._shards)
        if self.session is not None:
            self.session.progress.step = at.step
            self._arrival = _Arrival(
                newcomer,
                at.step,
                done.received,
                Parts(
                    drain=parts.drain,
                    group=parts.group + done.group_s,
                    state=done.state_s,
                ),
                time.monotonic(),
            )
        for callback in self.on_resize:
            callback()

    def _report_arrival(self) -> None:
        """Tell the head that this worker computes in the new generation, once its first batch is here."""
        arrival, self._arrival = self._arrival, None
        if arrival is None or self.session is None:
            return
        now = time.monotonic()
        old = arrival.parts
        parts = Parts(drain=old.drain, group=old.group, state=old.state, data=now - arrival.entered)
        pause = 0.0 if arrival.newcomer else now - self._boundary
        self.session.send(
            Active(
                worker=self.session.worker,
                generation=self.group.generation,
                first_step=arrival.step,
                pause_s=pause,
                parts=parts,
                bytes_received=arrival.received,
                steps_discarded=self._discarded,
            )
        )
        self._discarded = 0
        self.session.progress.held = False
        self.session.progress.generation = self.group.generation

    def _leave(self, upcoming: Upcoming) -> None:
        session = self.session
        assert session is not None
        if not upcoming.prepare.members:
            self._save_checkpoint()
        self._ledger.flush()
        session.deliver(Left(worker=session.worker, generation=self.group.generation, step=self.position.step), 2.0)
        raise SwitchedOut

    # ------------------------------------------------------------------------------------------------ rehearsal

    def _rehearse(self, loader: ElasticLoader) -> Iterator[Any]:
        """One body with a real batch whose results are thrown away: compiles, starts loader processes."""
        before = [buffer.detach().clone() for buffer in self.prepared.buffers()]
        key = Key(self.position.data_epoch, self.position.index, 0)
        reducer, gate = self._the_reducer, self.gate
        with rng.kept():
            batch = loader.fetch(key, lambda shards: [0])
            rng.seed_everything(mix(self.seed, "body", 0, 0))
            reducer.begin_body(0, 0.0, final=True, live=False)
            gate.open, gate.in_body, gate.stepped, gate.single = False, True, False, loader.layout.shards == 1
            self.rehearsing = True
            try:
                yield batch
            finally:
                self.rehearsing = False
                gate.in_body = False
            del batch
        self._restore(before)
        for _, parameter in self.prepared.parameters():
            parameter.grad = None
        self.checkpoint_asked = False

    def _announce(self, loader: ElasticLoader, epochs: int, max_steps: int | None) -> None:
        session = self.session
        assert session is not None
        total = loader.layout.steps * epochs
        if max_steps is not None:
            total = min(total, max_steps)
        total *= self.epochs_in_loop
        session.progress.total_steps = total
        layout = self.prepared.layout()
        session.announce(
            WorkerReady(
                worker=session.worker,
                signature=signature_of(layout),
                layout=layout,
                shards=loader.layout.shards,
                global_batch=loader.layout.global_batch,
                total_steps=total,
            )
        )

    def finish(self) -> None:
        """The script is over: write what is left of the ledger."""
        self._ledger.flush()


class _Arrival:
    """A switch that has not been reported yet."""

    def __init__(self, newcomer: bool, step: int, received: int, parts: Parts, entered: float) -> None:
        self.newcomer = newcomer
        self.step = step
        self.received = received
        self.parts = parts
        self.entered = entered
