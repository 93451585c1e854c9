"""The process group of one generation: control messages, and collectives that an interrupt can end.

- *Control* carries bytes on the host: `tell` and `gather`.
- *Transport* carries tensors of one device: `sum`, `copy`, `exchange`, `collect` launch a collective, and
  `wait_and_verify` waits for all launched ones. Control and transport share no communicator, so two members may launch
  them in different orders.
- *Streams* carry state between two members.

gloo's own abort does not unblock a pending collective (measured on torch 2.13), and gloo's ring fails only on members
that await data from the lost peer. One of these reports the loss, and the head's next order interrupts the others. So
collectives are always asynchronous, and a wait ends when their futures complete or when `interrupt` is called. Python
code runs once per wait, since every callback on gloo's thread needs the GIL. An interrupt aborts a device communicator,
which ends its collectives with undefined results: results of a device are valid only after `wait_and_verify`.

An interrupted group is abandoned. Its buffers are never used again, since a late peer may still write to them.
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
"""Seconds for which the pending work of an aborted communicator may stay on the device."""


class Group(Waits):
    """Ranks 0..size-1 of one generation. With one rank every collective is the identity.

    Autograd's threads may launch collectives. The communication thread calls `interrupt`. One thread at a time waits.

    Args:
        connections: None for a group of one rank.
        device: device of the transport's tensors.
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
        "(work, tensors) of launched collectives; the tensors are kept until a stream waits for the work"
        self._aborting: threading.Thread | None = None
        self._is_retired = False
        self.device_progress = devices.DeviceProgress()
        self.node = Node()
        "the other workers of this generation on the same node"

    @property
    def streams(self) -> Streams:
        """Connections for transfers of state. They are closed with the group."""
        assert self.connections.streams is not None, "a group of one rank has no streams"
        return self.connections.streams

    def wait_for_siblings(self) -> None:
        """Wait until all workers of this node are at this place. Call it before the script's code goes on.

        Raises:
            Interrupted: another worker of this node has left the generation, so this worker has to leave it, too.
        """
        self.node.share(None)
        if self.node.broken is not None:
            self.interrupt(self.node.broken)
            raise Interrupted(self.node.broken)

    def follow_sibling(self) -> None:
        """Interrupt this group because that of a sibling was interrupted, which completes no exchange. Any thread."""
        if not self._is_retired:
            self.interrupt("another worker of this node has lost its group")

    # ------------------------------------------------------------------------------------- interruption and shutdown

    def interrupt(self, reason: str) -> None:
        """End every pending and future collective and transfer of this group with `Interrupted`; from any thread."""
        # Set `broken` first: a thread that sees a collective complete checks `broken` next.
        super().interrupt(reason)
        self._begin_abort()
        self.end_transfers()

    def _begin_abort(self) -> None:
        # On a separate thread: an abort may take long, and the interrupting thread must go on with its heartbeats.
        with self._guard:
            transport = self.connections.transport
            if self._aborting is None and transport is not None and devices.asynchronous(self.device):
                self._aborting = communicators.abandon(transport)

    def end_transfers(self) -> None:
        """End all transfers of state from and to this member."""
        if self.connections.streams is not None:
            self.connections.streams.close()

    def retire(self) -> None:
        """Remove all work of this group from the device, so that its tensors may be freed.

        The training thread calls this before it makes buffers for the next group. Waits for a pending abort.

        Raises:
            FallowError: aborted collectives do not end, so later work on this device would never run.
        """
        self._is_retired = True
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
                f"{self.device} did not end the aborted collectives of generation {self.generation} within "
                f"{_DRAIN_S:g} s: this worker ends. See the driver's log on this node",
                Exit.TEMPFAIL,
            )

    def destroy(self) -> None:
        """Destroy the native groups. May block for `gloo.COLLECTIVE_TIMEOUT` if a peer is stopped: see `reap`."""
        self.end_transfers()
        with self._guard:
            connections, self.connections = self.connections, Connections()
            was_intact, self.broken = self.broken is None, self.broken or "destroyed"
        if was_intact and connections.transport is not None:
            communicators.release(connections.transport)
        for one in connections.gloo_groups:
            gloo.close_connections(one)
            one.shutdown()
        self._launched.clear()
        self.exchanges.clear()

    # ------------------------------------------------------------------------------------------------- transport

    def sum(self, tensor: torch.Tensor) -> None:
        """Launch a sum over the ranks, in place.

        Collectives of the transport are complete after `wait_and_verify`. On a device, work that the current stream
        gets after `stream_waits` runs after them. All ranks launch them in the same order.

        Raises:
            Interrupted: the group is broken.
            TypeError: the tensor is not on the transport's device.
        """
        self._launch(lambda group, tensor: group.allreduce([tensor]), tensor)

    def copy(self, tensor: torch.Tensor, root: int) -> None:
        """Launch a broadcast of `root`'s values to all ranks, in place. Raises as `sum`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._launch(lambda group, tensor: group.broadcast([tensor], options), tensor)

    def exchange(self, source: torch.Tensor, counts: list[int], target: torch.Tensor, source_counts: list[int]) -> None:
        """Launch an all-to-all exchange of parts of different lengths. Raises as `sum`.

        Args:
            source: 1-D, this rank's parts for all ranks, in rank order.
            counts: number of elements in `source` for each rank.
            target: 1-D, receives the parts from all ranks, in rank order.
            source_counts: number of elements in `target` from each rank.
        """
        if self.size == 1:
            target.copy_(source)
        self._launch(
            lambda group, target, source: group.alltoall_base(target, source, source_counts, counts), target, source
        )

    def collect(self, buffer: torch.Tensor) -> None:
        """Launch an all-gather, in place. Raises as `sum`.

        Args:
            buffer: 1-D, one piece per rank, all of one length; this rank's own piece is filled in.
        """
        if devices.asynchronous(self.device):
            self._launch(
                lambda group, buffer: group._allgather_base(buffer, buffer.chunk(self.size)[self.rank]), buffer
            )
            return
        for rank, piece in enumerate(buffer.chunk(self.size)):  # gloo's own all-gather takes four times as long
            self.copy(piece, rank)

    def connect_transport(
        self, device: torch.device, timeout_s: float, is_dropped: Callable[[], object] = devices.never_stop
    ) -> None:
        """Make the transport for tensors of `device`. All ranks call this together, with nothing pending.

        The attempt ends once `is_dropped` returns a true value.

        Raises:
            RuntimeError: other members did not connect, or the device's communicator failed.
        """
        if self.size > 1:
            # The second gloo group, if there is one, is for sums.
            gloo_group, store = self.connections.gloo_groups[:2][-1], PrefixStore("device", self.connections.store)
            self.connections.transport = communicators.connect(
                device, gloo_group, store, self.rank, self.size, timeout_s, is_dropped
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
            except dist.DistBackendError as error:  # NCCL's launch may see a lost peer before `get_error` does
                self.interrupt(self._failure() or gloo.reason(error))
            except RuntimeError:
                # A lost peer shows in `wait_and_verify`. Any other error here is a mistake in the program.
                failure = self._failure()
                if failure is None:
                    raise
                self.interrupt(failure)
        raise Interrupted(self.broken)

    def stream_waits(self) -> None:
        """Make the device's current stream, not the host, wait for all launched collectives. No effect on the host."""
        if devices.asynchronous(self.device):
            launched, self._launched = self._launched, []
            with self.device_progress.wait(self.device):
                for work, _ in launched:
                    work.wait()

    def wait_and_verify(self) -> None:
        """Wait until all launched collectives are complete and valid, and on a device all work of its current stream.

        This is the only wait for a device in a step.

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
        # While this device has work of its own, others wait for this member, and this member waits for nobody.
        devices.wait(own, self._failure)
        with self.waits():
            devices.wait(end, self._failure)
        self.device_progress.clear()
        # Check after the event: an abort completes events, too, with undefined results.
        failure = self._failure()
        if failure is not None:
            self.interrupt(failure)
            raise Interrupted(failure)

    def _failure(self) -> str | None:
        if self.broken is not None or self.size == 1 or not devices.asynchronous(self.device):
            return self.broken
        return communicators.failure(self.connections.transport, self.device)
