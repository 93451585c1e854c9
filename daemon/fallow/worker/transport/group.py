"""One generation's process group, and collectives that an interrupt can end.

gloo's own abort does not unblock a pending collective (measured on torch 2.13). So collectives here are always
asynchronous; `wait` ends when the works' futures have completed or when `interrupt` was called, whichever is first.
Python hears of completion once in a `wait`, not once for each work: every call from gloo's thread wants the GIL.
A group that was interrupted is abandoned: its buffers are never used again, since a late peer still writes to them.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from fallow.model import Exit, FallowError
from fallow.worker.handover.stream import Card, Streams, sources
from fallow.worker.transport.gloo_port import MovedStore, device_within

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Upper end of what one member may keep the others waiting (an evaluation on rank 0), and of a reaper's wait."""

_QUIET_S = 1.0
"""After this, what was on its way in an abandoned group has arrived."""

_UNUSED_TAG = 1 << 20
"""Of a message that nobody sends."""

_STAGGER_S = 0.1
_LATEST_S = 20.0


class Interrupted(Exception):
    """A pending collective was given up. Never reaches the user's code."""


class Group:
    """Ranks 0..size-1 of one generation. `pg` is None for a world of one: every collective is then the identity.

    Collectives may be issued from autograd's threads and `interrupt` comes from the communication thread; one thread at
    a time waits.
    """

    def __init__(self, generation: int, rank: int, size: int, pg: Any | None, streams: Streams | None = None) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._pg = pg
        self._streams = streams
        self.waiting = False
        "the training thread waits for other members"
        self.turned_at = 0.0
        "time.monotonic at which the last wait began or ended, or a part of the state came in"
        self._guard = threading.Lock()
        self._broken: str | None = None
        self._kept: list[tuple[Any, Any]] = []
        "works that were not waited for yet, with their tensors"
        self._waiter: _Waiter | None = None
        self._wakes: list[Callable[[], None]] = []
        self.waited_s = 0.0
        "seconds that `wait` has taken, all calls together"

    @property
    def broken(self) -> str | None:
        """Why the group cannot be used any more; None: it stands."""
        return self._broken

    @property
    def pending(self) -> bool:
        """Something was launched that nobody has waited for."""
        return bool(self._kept)

    @property
    def abandoned(self) -> bool:
        """True if collectives were left behind: native threads may still hold on to them."""
        return self._broken is not None and self._pg is not None

    @property
    def streams(self) -> Streams:
        """Transfers of state between two members; they end with the group."""
        assert self._streams is not None, "a world of one hands nothing over"
        return self._streams

    def interrupt(self, reason: str) -> None:
        """End every pending and future collective and transfer of this group with `Interrupted`."""
        with self._guard:
            if self._broken is None:
                self._broken = reason
            waiter = self._waiter
        if waiter is not None:
            waiter.wake()
        for wake in self._wakes:
            wake()
        self.end_transfers()

    def on_break(self, wake: Callable[[], None]) -> None:
        """Call this, from any thread, whenever the group is broken: somebody waits for something else of it."""
        self._wakes.append(wake)

    def end_transfers(self) -> None:
        """Nobody takes state from this member any more, nor it from others."""
        if self._streams is not None:
            self._streams.close()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Launch a sum over the ranks, in place; complete after `wait`."""
        if self._pg is not None:
            self._launch(lambda pg: pg.allreduce([tensor]), tensor)

    def tell(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Launch a gather of few bytes to all; the returned ones, by rank, are complete after `wait`.

        Directly: each rank sends N - 1 messages. gloo's ring needs 4 (N - 1) for a sum and 2 (N - 1) for a gather, each
        after the one before it, and every message costs both sides processor time.

        Args:
            part: uint8, 1-D, of equal length on all ranks.
        """
        if self._pg is None:
            return [part]
        given = part.repeat(self.size, 1)
        taken = torch.empty_like(given)
        self._launch(lambda pg: pg.alltoall_base(taken, given, [], []), (given, taken))
        return list(taken)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Launch a copy of `root`'s values to all, in place; complete after `wait`."""
        if self._pg is None:
            return
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._launch(lambda pg: pg.broadcast([tensor], options), tensor)

    def exchange(self, given: torch.Tensor, counts: list[int], taken: torch.Tensor, arriving: list[int]) -> None:
        """Launch an exchange of unlike parts; complete after `wait`.

        Args:
            given: what this rank has for the others, by rank.
            counts: elements of it for each rank.
            taken: filled with what the others have for this one, by rank.
            arriving: elements from each rank.
        """
        if self._pg is not None:
            self._launch(lambda pg: pg.alltoall_base(taken, given, arriving, counts), (given, taken))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Launch a gather to all; the returned tensors, by rank, are complete after `wait`."""
        if self._pg is None:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._launch(lambda pg: pg.allgather([gathered], [tensor]), (tensor, gathered))
        return gathered

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Inside, the training thread waits for other members: the head must not take it for one that hangs."""
        self.waiting, self.turned_at = True, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.turned_at = False, time.monotonic()

    def moved(self) -> None:
        """A part of the state has come in: those who wait for the rest of it get on."""
        self.turned_at = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything launched is complete.

        Raises:
            Interrupted: `interrupt` was called, a peer's connection is lost, or `timeout_s` has passed.
        """
        if self._broken is None and self._kept:
            with self.waits():
                self._wait(timeout_s)
        if self._broken is not None:
            raise Interrupted(self._broken)
        self._kept.clear()

    def _wait(self, timeout_s: float | None) -> None:
        began = time.monotonic()
        try:
            self._complete([work.get_future() for work, _ in self._kept], timeout_s)
        except RuntimeError as error:
            self.interrupt(_reason(error))
        self.waited_s += time.monotonic() - began

    def _complete(self, futures: list[Any], timeout_s: float | None) -> None:
        """Return when all are complete or the group is broken; raises what a future raises."""
        every = torch.futures.collect_all(futures)
        if not every.done():
            waiter = _Waiter()
            with self._guard:
                self._waiter = waiter
                if self._broken is not None:
                    waiter.wake()
            # Runs on gloo's thread, or here if all are complete by now.
            every.add_done_callback(lambda _: waiter.wake())
            if not waiter.wait(timeout_s):
                self.interrupt(f"no answer from a peer within {timeout_s:g} s")
            self._waiter = None
        if self._broken is None:
            every.value()

    def _launch(self, issue: Any, tensors: Any) -> None:
        if self._broken is not None:
            raise Interrupted(self._broken)
        try:
            self._kept.append((issue(self._pg), tensors))
        except RuntimeError as error:
            self.interrupt(_reason(error))
            raise Interrupted(self._broken) from None

    def destroy(self) -> None:
        """Drop the native group. May block for `COLLECTIVE_TIMEOUT` if a peer is stopped: see `reap`."""
        if self._pg is not None:
            self._close_connections(self._pg)
            self._pg.shutdown()
        self._pg = None
        self._kept.clear()
        self.end_transfers()

    def _close_connections(self, pg: Any) -> None:
        """End collectives that still wait for a peer, which `shutdown` would wait for.

        gloo has no call for that, but it closes all connections of a group when a receive runs out of time.
        """
        for peer in range(self.size):
            if peer == self.rank:
                continue
            try:
                pg.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "imed out" in str(error):
                    return
                # This one's connection is lost already, which says nothing of the others'.


class _Waiter:
    """Lets one thread sleep until another wakes it, once: the cheapest there is in Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout_s: float | None) -> bool:
        """False: nobody called `wake` in time."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def wake(self) -> None:
        """May be called several times."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


def _reason(error: BaseException) -> str:
    """The first line of an error, without gloo's source position and advice."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    text = re.sub(r"^\[[^\]]*/gloo/[^\]]*\] ", "", lines[0])
    return text.partition(". This is typically caused")[0]


def build_group(
    generation: int,
    rank: int,
    size: int,
    store: Store | None,
    address: str,
    timeout_s: float,
    *,
    holds: bool = False,
    ports: range | None = None,
) -> Group:
    """Build a group over gloo and open its connections.

    Args:
        generation: number of the generation, for the record only; `store` must be private to it.
        rank: this process's place, 0-based.
        size: members; 1 builds no native group at all.
        store: rendezvous; may be None for a size of 1.
        address: the only local address to listen on.
        timeout_s: seconds until the attempt fails.
        holds: this member has the run's state; those who have not open lines to some who have.
        ports: to listen on; None: the kernel chooses.

    Raises:
        FallowError: the group could not be built; the text says why.
    """
    if size == 1:
        return Group(generation, 0, 1, None)
    started = time.monotonic()
    pg, reason = None, ""
    try:
        assert store is not None
        pg = _connect(store, rank, size, address, timeout_s, ports)
        group = Group(generation, rank, size, pg, Streams(generation, address, ports))
    except (RuntimeError, OSError) as error:
        reason = _reason(error)
    # Outside of `except`: the error's traceback keeps the listening device alive, and gloo ends the process when a late
    # peer connects to a group that failed.
    if pg is not None and not reason:
        try:
            _open_connections(group, timeout_s - (time.monotonic() - started), holds=holds)
            pg._set_default_timeout(COLLECTIVE_TIMEOUT)
        except (RuntimeError, OSError, Interrupted) as error:
            reason = _reason(error)
            group.end_transfers()
            # Its pending callbacks would drop the last reference on gloo's own thread, which cannot join itself.
            reap(group)
    if reason:
        raise FallowError(
            f"process group of generation {generation} (rank {rank} of {size}) on {address}: {reason}; "
            "check that the nodes reach each other on that address",
            Exit.TEMPFAIL,
        )
    return group


def _connect(store: Store, rank: int, size: int, address: str, timeout_s: float, ports: range | None) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Not lazily: such a group ends its connections' thread before the connections, and that thread never ends while a
    # connection has something to read that no collective takes any more (gloo `Context::~Context`, `Loop::run`).
    if ports is None:
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    else:
        device, moved = device_within(address, ports)
        store = MovedStore(store, moved)
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


def _open_connections(group: Group, timeout_s: float, *, holds: bool) -> None:
    # All are connected already; where they hand out state goes through the group itself.
    card = torch.frombuffer(bytearray(group.streams.card(holds=holds).encode()), dtype=torch.uint8)
    cards = group.all_gather(card)
    group.wait(timeout_s)
    group.streams.cards = [Card.decode(row.numpy().tobytes()) for row in cards]
    if not holds:
        # Those who will receive know now from whom, in all likelihood.
        there = [rank for rank, card in enumerate(group.streams.cards) if card.holds]
        away = [rank for rank in range(group.size) if rank not in there]
        for donor in sources(there, away)[group.rank] if there else []:
            group.streams.connect(donor)


def reap(group: Group) -> None:
    """Destroy a group later, on a thread of its own, since that can block for as long as a peer is stopped.

    Later, and the higher ranks before the lower: gloo 2.13 ends the whole process ("enforce fail ... state_ <=
    CONNECTED") if a pair is closed here in the moment in which something comes from its other end, be it a late peer's
    data or that end's own closing.
    """

    def destroy() -> None:
        time.sleep(_QUIET_S + min(_STAGGER_S * (group.size - 1 - group.rank), _LATEST_S))
        group.destroy()

    threading.Thread(target=destroy, name=f"reaper-{group.generation}", daemon=True).start()
