"""A fake asynchronous accelerator, device `fake`, for tests on machines without a GPU; see README.md.

`load` makes the device known to this process, for good. So tests load it in processes of their own (`crew.py`).
"""

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accelerator import build, torch_device

__all__ = [
    "enqueue",
    "held",
    "host_view",
    "load",
    "mark_garbage",
    "permit_speculation",
    "pooled_streams",
    "report_syncs",
    "reset",
    "speculating",
    "take_reports",
]

_loaded = False
_held: set[int] = set()


def load() -> None:
    """Build the device if need be, and register it with torch. The first call compiles for about 15 s.

    Raises:
        build.Unavailable: there is no C++ compiler, or it fails.
    """
    global _loaded
    if _loaded:
        return
    torch.ops.load_library(str(build.library()))
    torch_device.register(_ops())
    from accelerator import collectives, nccl

    collectives.register()
    nccl.present()
    _loaded = True


def report_syncs(on: bool) -> None:
    """Raise where the host waits for the device without asking for it: `item`, `bool`, `.cpu()`, `nonzero`, copies of
    pageable memory. The report names the operator. Default: off."""
    _ops().report_syncs(on)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Keep a stream from starting its next task: this makes an interleaving certain."""
    _hold(stream.stream_id, True)
    try:
        yield
    finally:
        _hold(stream.stream_id, False)


@contextlib.contextmanager
def pooled_streams(size: int = 32) -> Iterator[None]:
    """Give streams of a priority out again after so many, as torch does on CUDA. Else each one is new."""
    _ops().pool_streams(size)
    try:
        yield
    finally:
        _ops().pool_streams(0)


def take_reports() -> list[str]:
    """Return and forget what was reported, and forget the asynchronous error that waits to be raised."""
    return list(_ops().take_reports())


def reset() -> list[str]:
    """Make the device as new: release held streams, wait for all tasks, report no hidden waits. Returns the reports.

    Memory that is still in use keeps its history; an unordered access to it is still found.
    """
    for stream_id in [*_held]:
        _hold(stream_id, False)
    reports = take_reports()
    for _ in range(2):  # an asynchronous error is raised by the first of them
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize()
    report_syncs(False)
    return reports + take_reports()


def mark_garbage(tensor: torch.Tensor, why: str) -> None:
    """Make every task an error that reads this memory before it is overwritten as a whole.

    For functions given to `enqueue`: it acts at once, not behind the tasks that are queued.
    """
    _ops().mark_garbage(tensor, why)


@contextlib.contextmanager
def speculating() -> Iterator[None]:
    """What this thread launches inside may read garbage: it works on what is still to come, and ends in a collective of
    the same communicator, which then ends with garbage, too."""
    _ops().speculate(True)
    try:
        yield
    finally:
        _ops().speculate(False)


def permit_speculation() -> None:
    """From now on the engine may turn exact sums into gradients before it is certain that they are good.

    The host does not wait between the two halves of a sum: the second half is queued behind the first, and both are
    void if the communicator ends. Its result is gathered by that communicator, so garbage is still found in gradients.
    """
    from fallow.worker.reduction.exact import Exact

    conclude = Exact.conclude

    @functools.wraps(conclude)
    def speculative(*args: Any) -> None:
        with speculating():
            conclude(*args)

    Exact.conclude = speculative  # type: ignore[method-assign]


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the same memory, for functions given to `enqueue`."""
    return _ops().host_view(tensor)


def enqueue(
    function: Callable[[], None],
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    name: str = "enqueue",
) -> None:
    """Run a function on the current stream's thread, behind what the stream was given so far.

    Args:
        function: what to run. An exception becomes the device's asynchronous error.
        reads: tensors whose contents it uses.
        writes: tensors that it overwrites.
        name: for reports.
    """
    token = next(_tokens)
    _functions[token] = function
    _ops().enqueue(_call_address, token, list(reads), list(writes), name)


def _ops() -> Any:
    return torch.ops.fallow_fake


def _hold(stream_id: int, on: bool) -> None:
    (_held.add if on else _held.discard)(stream_id)
    _ops().hold(stream_id, on)


_tokens = itertools.count()
_functions: dict[int, Callable[[], None]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _call(token: int) -> None:
    try:
        _functions.pop(token)()
    except BaseException as error:
        _ops().fail(f"{type(error).__name__}: {error}")


_call_address = ctypes.cast(_call, ctypes.c_void_p).value
