"""Collectives with NCCL's rules on device `fake`, over gloo.

A collective is queued on the communicator's own stream, behind the stream that is current at the launch, and completes
there only. `Work.wait` makes the current stream wait, not the host. What goes wrong is not raised: outputs become 0xFF,
events complete, and `get_error` tells. Each collective is compared between the ranks first, so that an unlike order is
an error and not a hang.
"""

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ErrorType,
    ProcessGroupGloo,
    ReduceOp,
    Work,
)

import accelerator

BACKEND = "fakenccl"
_DEVICE = torch.device("privateuseone:0")  # called `fake` once the device is loaded
_FINGERPRINT_BYTES = 192

Tensors = Sequence[torch.Tensor]
Exchange = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
_alive: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_exiting = threading.Event()


class _Ended(Exception):
    """The communicator was aborted, or failed."""


def register() -> None:
    """Make this the backend that torch chooses for device `fake`."""
    dist.Backend.register_backend(BACKEND, Communicator, devices=["fake"])
    atexit.register(end_all)


def communicators() -> "list[Communicator]":
    """All that are in use, oldest first."""
    return sorted(_alive, key=lambda c: c.stream.stream_id)


class Communicator(dist.ProcessGroup):
    """A process group for device `fake` that behaves like ProcessGroupNCCL. For tests: `ignores_abort` (what is
    pending stays pending), `_check_launch`, `fail` and `stream` (to hold it).

    Args:
        store: where the ranks find each other.
        rank: of this process.
        size: number of ranks.
        timeout: a connection or a collective that takes longer fails.
        connects: now; else at the first collective, or when `_connect_gloo` is called.

    Raises:
        RuntimeError: the ranks do not find each other.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=10),
        *,
        connects: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self.stream = torch.Stream(device=_DEVICE)
        self.ignores_abort = False
        self._store, self._timeout = store, timeout
        self._changed = threading.Condition()
        self._reason = ""
        self._aborted = False
        self._error = ErrorType.SUCCESS
        self._launched = 0
        self._gloo: list[ProcessGroupGloo] = []
        if connects:
            self._connect_gloo()
        _alive.add(self)

    def abort(self) -> None:
        """End what is pending, with garbage in its outputs, and refuse further collectives. From any thread.

        `get_error` does not tell: as with ProcessGroupNCCL, who aborts knows.
        """
        with self._changed:
            self._aborted = True
            self._reason = self._reason or "aborted"
            self._changed.notify_all()

    def shutdown(self) -> None:
        """As `abort`. Wait for the stream first if the results matter."""
        self.abort()

    def fail(self, reason: str, error: ErrorType = ErrorType.COMM_ERROR) -> None:
        """For tests: an asynchronous error of this rank alone. What is pending here ends with garbage."""
        with self._changed:
            if self._error == ErrorType.SUCCESS and not self._aborted:
                self._error = error
            self._reason = self._reason or reason
            self._changed.notify_all()

    def get_error(self) -> ErrorType:
        """The first asynchronous error. The only place where it shows."""
        return self._error

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        op = _reduce_op(opts)
        return self._launch(
            f"all_reduce {_name(op)}", tensors, tensors, lambda given, taken: self._sum(taken, given, op)
        )

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions) -> Work:
        def exchange(given: list[torch.Tensor], taken: list[torch.Tensor]) -> None:
            for output, value in zip(taken, given, strict=False):  # `given` is empty except on the root
                output.copy_(value)
            self._finish(lambda: self._connect_gloo().broadcast(taken, opts))

        given = tensors if self.rank() == opts.rootRank else ()
        return self._launch(f"broadcast root {opts.rootRank}", given, tensors, exchange)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        def exchange(given: list[torch.Tensor], taken: list[torch.Tensor]) -> None:
            self._gather(list(taken[0].view(-1).chunk(self.size())), given[0].view(-1))

        return self._launch("all_gather", [given], [output], exchange)

    def allgather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        return self._launch("all_gather", given, outputs[0], lambda given, taken: self._gather(taken, given[0]))

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_counts: list[int],
        given_counts: list[int],
        opts: Any = None,
    ) -> Work:
        def exchange(given: list[torch.Tensor], taken: list[torch.Tensor]) -> None:
            gloo = self._connect_gloo()
            self._finish(lambda: gloo.alltoall_base(taken[0], given[0], output_counts, given_counts, AllToAllOptions()))

        return self._launch("all_to_all", [given], [output], exchange, compare_shapes=False)

    def barrier(self, opts: Any = None) -> Work:
        work = self.allreduce([torch.zeros(1, device=_DEVICE)])
        work.wait()
        torch.accelerator.current_stream().synchronize()
        return work

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return BACKEND

    def _check_launch(self) -> None:
        """For tests: raise DistBackendError where NCCL's launch would. `get_error` does not tell of it, or not yet."""

    def _ended(self) -> bool:
        return _exiting.is_set() or bool(self._reason and not (self._aborted and self.ignores_abort))

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(self._ended, seconds)

    def _finish(self, issue: Callable[[], Work]) -> None:
        """Do something with gloo until it is complete or the communicator ends: gloo's own abort unblocks nothing.

        Nothing is issued behind the end: a peer would take it for what it expects next, and gloo ends the process then.
        """
        if self._ended():
            raise _Ended
        # No callback: gloo's thread would run it, and that thread must not want the GIL of a process that ends.
        future, pause_s = issue().get_future(), 1e-4
        while not (future.done() or self._ended()):
            self._pause(pause_s)
            pause_s = min(1.5 * pause_s, 5e-3)
        if self._ended():
            raise _Ended
        future.value()

    def _connect_gloo(self) -> ProcessGroupGloo:
        """Connects all ranks at the first use."""
        if not self._gloo:
            store = dist.PrefixStore(BACKEND, self._store)
            self._gloo.append(ProcessGroupGloo(store, self.rank(), self.size(), self._timeout))
            weakref.finalize(self, _destroy, self._gloo).atexit = False
        return self._gloo[0]

    def _sum(self, outputs: list[torch.Tensor], given: list[torch.Tensor], op: Any) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM if op == ReduceOp.AVG else op
        for output, value in zip(outputs, given, strict=True):
            output.copy_(value)
        self._finish(lambda: self._connect_gloo().allreduce(outputs, options))
        for output in outputs if op == ReduceOp.AVG else ():
            output.div_(self.size())

    def _gather(self, outputs: list[torch.Tensor], given: torch.Tensor) -> None:
        self._finish(lambda: self._connect_gloo().allgather([outputs], [given]))

    def _launch(
        self, name: str, given: Tensors, outputs: Tensors, exchange: Exchange, *, compare_shapes: bool = True
    ) -> Work:
        """Queue a collective.

        Args:
            name: of the operation, equal on all ranks.
            given: tensors that it reads.
            outputs: tensors that it writes.
            exchange: fills CPU tensors like `outputs` from CPU copies of `given`.
            compare_shapes: whether the ranks' shapes must be equal.
        """
        for tensor in (*given, *outputs):
            if tensor.device.type != _DEVICE.type:
                raise ValueError(f"{BACKEND}: {name}: tensors must be on the device, got one on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{BACKEND}: {name}: tensors must be contiguous")
        if self._reason:
            raise dist.DistBackendError(f"{BACKEND}: {name}: the communicator is gone: {self._reason}")
        self._check_launch()
        self._launched += 1
        title = f"#{self._launched} {name}"
        shapes = f" {[(*tensor.shape,) for tensor in outputs]} {outputs[0].dtype}" if compare_shapes else ""
        sources = [accelerator.host_view(tensor) for tensor in given]
        targets = [accelerator.host_view(tensor) for tensor in outputs]
        marks = [tensor.detach() for tensor in outputs]
        for tensor in (*given, *outputs):
            tensor.record_stream(self.stream)  # as NCCL, which keeps them until they are done with

        def task() -> None:
            try:
                self._compare(title + shapes)
                # Copies: after an abort gloo may still write.
                copies = [torch.empty_like(target) for target in targets]
                exchange([source.clone() for source in sources], copies)
                for target, copy in zip(targets, copies, strict=True):
                    target.copy_(copy)
            except (RuntimeError, _Ended) as error:
                self.fail(str(error).partition("\n")[0], _kind(error))
                for target, mark in zip(targets, marks, strict=True):
                    target.view(-1).view(torch.uint8).fill_(0xFF)
                    accelerator.mark_garbage(mark, f"garbage of {title} ({self._reason})")
            marks.clear()

        self.stream.wait_event(torch.accelerator.current_stream().record_event())
        with self.stream:
            accelerator.enqueue(task, given, outputs, name.partition(" ")[0])
            end = self.stream.record_event()
            future = torch.futures.Future(devices=[_DEVICE])
            future.set_result(list(outputs))  # done at once, as NCCL's: events say when the values are there
        return _Work(end, future)

    def _compare(self, fingerprint: str) -> None:
        """Raise RuntimeError unless all ranks have come to the same collective."""
        raw = fingerprint.encode()[:_FINGERPRINT_BYTES].ljust(_FINGERPRINT_BYTES)
        every = [torch.empty(_FINGERPRINT_BYTES, dtype=torch.uint8, device="cpu") for _ in range(self.size())]
        self._gather(every, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        texts = [row.numpy().tobytes().decode().rstrip() for row in every]
        if len(set(texts)) > 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RuntimeError(f"ranks launched unlike collectives: {told}")


class _Work(Work):
    def __init__(self, end: torch.Event, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._end, self._future = end, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._end)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._end.query()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _destroy(only_reference: list[ProcessGroupGloo]) -> None:
    """Elsewhere: this blocks until what is pending ends, which may be gloo's timeout."""
    threading.Thread(target=only_reference.clear, daemon=True).start()


def _reduce_op(options: Any) -> Any:
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _kind(error: Exception) -> ErrorType:
    return ErrorType.TIMEOUT if "imed out" in str(error) else ErrorType.COMM_ERROR


def end_all() -> None:
    """Before the interpreter ends: its threads must not be inside a collective."""
    _exiting.set()
    for communicator in communicators():
        communicator.abort()
        for gloo in communicator._gloo:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))  # never destroyed: see `_destroy`
    accelerator.reset()
