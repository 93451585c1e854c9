"""One generation's members: what they tell each other, and collectives that an interrupt can end.

*Control* carries bytes on the host: `tell` and `gather`. *Transport* carries tensors of one device: `sum`, `copy`,
`exchange`, `collect`; they are launched, and `wait_and_verify` is the one wait for them. The two share no
communicator, so they may be launched in an unlike order on two members. *Streams* carry state between two members.

gloo's own abort does not unblock a pending collective (measured on torch 2.13), and its ring fails only on members that
have something of a lost peer's under way: one of them tells of it, and the order that follows interrupts the others. So
collectives are always asynchronous; a wait ends when their futures have completed or when `interrupt` was called,
whichever is first. Python hears of completion once in a wait: every call from gloo's thread wants the GIL. A device
communicator is aborted, which ends its collectives with garbage: what a device has computed counts only after
`wait_and_verify`.

A group that was interrupted is abandoned: its buffers are never used again, since a late peer still writes to them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from fallow.model import Exit, FallowError
from fallow.worker.transport import communicators, gloo
from fallow.worker.transport import device as devices
from fallow.worker.transport.stream import Streams
from fallow.worker.transport.waits import Connections, Interrupted, Node, Waits

_DRAIN_S = 5.0
"""For so long an aborted communicator may take to end what it has on the device."""


class Group(Waits):
    """Ranks 0..size-1 of one generation. In a world of one every collective is the identity.

    Collectives may be launched from autograd's threads and `interrupt` comes from the communication thread; one thread
    at a time waits. `connections` is None for a world of one; `device` is that of the transport's tensors.
    """

    def __init__(
        self,
        generation: int,
        rank: int,
        size: int,
        connections: Connections | None = None,
        device: torch.device = devices.HOST,
    ) -> None:
        super().__init__(size, connections)
        self.generation = generation
        self.rank = rank
        self.device = device
        self._launched: list[tuple[Any, Sequence[torch.Tensor]]] = []
        "works of the transport; on a device the tensors stay until a stream waits for the work"
        self._aborting: threading.Thread | None = None
        self.device_progress = devices.DeviceProgress()
        self.node = Node()
        "the other workers of this generation on the same node"

    @property
    def streams(self) -> Streams:
        """Transfers of state between two members; they end with the group."""
        assert self.connections.streams is not None, "a world of one hands nothing over"
        return self.connections.streams

    # -------------------------------------------------------------------------------------------------- its end

    def interrupt(self, reason: str) -> None:
        """End every pending and future collective and transfer of this group with `Interrupted`; from any thread."""
        # First of all: who sees a collective complete looks next whether the group is broken.
        super().interrupt(reason)
        self._begin_abort()
        self.end_transfers()

    def _begin_abort(self) -> None:
        # On a thread of its own: it may take long, and the heartbeats of who interrupts must go on.
        with self._guard:
            transport = self.connections.transport
            if self._aborting is None and transport is not None and devices.asynchronous(self.device):
                self._aborting = communicators.abandon(transport)

    def end_transfers(self) -> None:
        """Nobody takes state from this member any more, nor it from others."""
        if self.connections.streams is not None:
            self.connections.streams.close()

    def retire(self) -> None:
        """Leave nothing of this group on the device: its tensors may be freed, and another group may take over.

        For the training thread, before it makes buffers for the next group. Waits for the end of an abort.

        Raises:
            FallowError: aborted collectives do not end, so nothing on this device would ever end behind them.
        """
        self.stream_waits()
        if self.broken is None or self.size == 1 or not devices.asynchronous(self.device):
            return
        end = time.monotonic() + _DRAIN_S
        self._begin_abort()
        if self._aborting is not None:
            self._aborting.join(_DRAIN_S)
        drained = devices.event(self.device)
        devices.wait(drained, lambda: time.monotonic() > end)
        if drained is not None and not drained.query():
            raise FallowError(
                f"{self.device} has not ended the aborted collectives of generation {self.generation} within "
                f"{_DRAIN_S:g} s: this member gives up; see the driver's log on this node",
                Exit.TEMPFAIL,
            )

    def destroy(self) -> None:
        """Drop the native groups. May block for `gloo.COLLECTIVE_TIMEOUT` if a peer is stopped: see `reap`."""
        self.end_transfers()
        with self._guard:
            connections, self.connections = self.connections, Connections()
            whole, self.broken = self.broken is None, self.broken or "destroyed"
        if whole and connections.transport is not None:
            communicators.release(connections.transport)
        for one in connections.gloo_groups:
            gloo.close_connections(one)
            one.shutdown()
        self._launched.clear()
        self.exchanges.clear()

    # ------------------------------------------------------------------------------------------------- transport

    def sum(self, tensor: torch.Tensor) -> None:
        """Launch a sum over the ranks, in place.

        This and the other collectives of the transport are complete after `wait_and_verify`; on a device, what the
        current stream is given after `stream_waits` comes behind them. All ranks launch them in the same order.

        Raises:
            Interrupted: the group is broken.
            TypeError: the tensor is not on the transport's device.
        """
        self._launch(lambda group, tensor: group.allreduce([tensor]), tensor)

    def copy(self, tensor: torch.Tensor, root: int) -> None:
        """Launch a copy of `root`'s values to all, in place. Raises as `sum`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._launch(lambda group, tensor: group.broadcast([tensor], options), tensor)

    def exchange(self, given: torch.Tensor, counts: list[int], taken: torch.Tensor, arriving: list[int]) -> None:
        """Launch an exchange of unlike parts. Raises as `sum`.

        Args:
            given: 1-D, what this rank has for each, by rank.
            counts: elements of it for each rank.
            taken: 1-D, filled with what each has for this one, by rank.
            arriving: elements from each rank.
        """
        if self.size == 1:
            taken.copy_(given)
        self._launch(lambda group, taken, given: group.alltoall_base(taken, given, arriving, counts), taken, given)

    def collect(self, whole: torch.Tensor) -> None:
        """Launch that all get all pieces of `whole`, of which each rank has its own in its place. Raises as `sum`.

        Args:
            whole: 1-D, as many pieces of one length as there are ranks.
        """
        if devices.asynchronous(self.device):
            self._launch(lambda group, whole: group._allgather_base(whole, whole.chunk(self.size)[self.rank]), whole)
            return
        for rank, piece in enumerate(whole.chunk(self.size)):  # gloo's own all-gather takes four times as long
            self.copy(piece, rank)

    def connect_transport(
        self, device: torch.device, timeout_s: float, dropped: Callable[[], object] = devices.never
    ) -> None:
        """Make the transport for tensors of `device`. All ranks do so together, with nothing pending.

        The attempt is given up when `dropped` returns something true.

        Raises:
            RuntimeError: the others did not come, or the device's communicator refused.
        """
        if self.size > 1:
            # Of two or more the second one is for sums.
            gloo_group, store = self.connections.gloo_groups[:2][-1], PrefixStore("device", self.connections.store)
            self.connections.transport = communicators.connect(
                device, gloo_group, store, self.rank, self.size, timeout_s, dropped
            )
        self.device = device

    def _launch(self, collective: communicators.Launch, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise TypeError(f"the transport is for {self.device}, not for a tensor on {tensor.device}")
        if self.size == 1:
            return
        if self.broken is None:
            try:
                work = communicators.launch(self.connections.transport, collective, tensors)
                self._launched.append((work, tensors))
                return
            except dist.DistBackendError as error:  # NCCL's launch may see a lost peer before `get_error` tells of it
                self.interrupt(self._failure() or gloo.reason(error))
            except RuntimeError:
                # A lost peer does not show here but in `wait_and_verify`: else it is a mistake in the program.
                failure = self._failure()
                if failure is None:
                    raise
                self.interrupt(failure)
        raise Interrupted(self.broken)

    def stream_waits(self) -> None:
        """The device's current stream waits for all that was launched; the host does not. Nothing on the host."""
        if devices.asynchronous(self.device):
            launched, self._launched = self._launched, []
            with self.device_progress.wait(self.device):
                for work, _ in launched:
                    work.wait()

    def wait_and_verify(self) -> None:
        """Wait until all that was launched is complete and good, and on a device all that its current stream was given.

        The one wait for a device in a step.

        Raises:
            Interrupted: `interrupt` was called, a peer's connection is lost, or the communicator failed.
        """
        if not devices.asynchronous(self.device):
            self.finish([work for work, _ in self._launched])
            self._launched.clear()
            return
        own = devices.event(self.device)
        self.stream_waits()
        end = devices.event(self.device)
        # As long as this device itself has something to do, others wait for this member, and it for nobody.
        devices.wait(own, self._failure)
        with self.waits():
            devices.wait(end, self._failure)
        self.device_progress.arrived()
        # After the event: an abort completes events, too, with garbage before them.
        failure = self._failure()
        if failure is not None:
            self.interrupt(failure)
            raise Interrupted(failure)

    def _failure(self) -> str | None:
        if self.broken is not None or self.size == 1 or not devices.asynchronous(self.device):
            return self.broken
        return communicators.failure(self.connections.transport, self.device)
