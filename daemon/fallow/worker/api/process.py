"""What makes a process a worker: its secret, its signals and its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import msgspec

import fallow
from fallow.core.failures import APART, STRANGER, Apart, Stranger
from fallow.core.network import data_address, port_range
from fallow.model import STACK_SIGNAL, Exit, FallowError, WorkerSecret
from fallow.wire.address import interfaces

_PR_SET_PDEATHSIG = 1
_LONGEST_SECRET = 65536
_NATIVE = ("build-", "reaper-")
"Beginnings of the names of threads that build and destroy groups."
_NATIVE_S = 3.0
_NOT_THE_SCRIPTS = (str(Path(fallow.__file__).parent) + os.sep, *sysconfig.get_paths().values())
"Beginnings of file names that are not part of a user's script."


def _outermost_code() -> CodeType:
    """Of the frame in which this thread's Python begins."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def listens_on(secret: WorkerSecret, environ: Mapping[str, str] = os.environ) -> tuple[str, range | None]:
    """The address, and the range of ports (None: any), on which this worker listens for the others.

    Raises:
        FallowError: no interface is the one that the job's variables or `[network]` ask for.
    """
    ports = secret.network.member_ports
    address = data_address(interfaces(), secret.address, secret.network, environ)
    return address, port_range(ports) if ports else None


def read_secret(descriptor: int) -> WorkerSecret:
    """Read the one message that the agent left in the inherited pipe, and close the pipe.

    Raises:
        FallowError: the pipe is closed or holds something else.
    """
    data = b""
    try:
        while len(data) <= _LONGEST_SECRET:
            more = os.read(descriptor, _LONGEST_SECRET)
            if not more:
                break
            data += more
        os.close(descriptor)
        return msgspec.msgpack.decode(data, type=WorkerSecret)
    except (OSError, msgspec.DecodeError) as error:
        raise FallowError(
            f"FALLOW_CHANNEL_FD={descriptor} gives no worker secret ({error}); "
            "unset FALLOW_WORKER to run the script by itself",
            Exit.USAGE,
        ) from None


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process, by that signal, when its agent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(Exit.TEMPFAIL)


def leave_sigterm_to_the_head(warned: Callable[[], None] = lambda: None) -> None:
    """Survive SIGTERM: Slurm sends it to the whole step, and the head releases this worker at a step boundary.

    Args:
        warned: called by the handler; this worker leaves by itself where no head is there.
    """
    owner = os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked loader process: it ends as usual
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            warned()

    signal.signal(signal.SIGTERM, on_sigterm)


def tell_stacks() -> None:
    """Have a crash, or the agent's signal before it kills a worker that hangs, write the stack to standard error.

    It is done inside the signal's handler, so it works while the interpreter is blocked.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=False)
        faulthandler.register(STACK_SIGNAL, all_threads=False, chain=False)


def signature_of(error: BaseException, trace: TracebackType | None) -> str:
    """Type and place of an exception, the same wherever the same line of a script fails.

    The place is the innermost frame of the script's own: not Fallow's, and in no installed package.
    """
    if isinstance(error, Apart):
        return APART + error.message
    if isinstance(error, Stranger):
        return STRANGER + error.message
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_SCRIPTS)]
    if not frames:
        return type(error).__name__
    last = (own or frames)[-1]
    return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}"


def leave_things_be(*things: Any) -> None:
    """Have the interpreter end with the script's exit value, which it alone knows, but tear as little down as it can.

    Args:
        things: stay as they are until the process is gone, with all that they refer to.
    """
    # One that comes back from native code while the interpreter goes would end the process by an abort.
    end = time.monotonic() + _NATIVE_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NATIVE):
            thread.join(max(0.0, end - time.monotonic()))
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    gc.freeze()
    # Runs in the place of libraries' own ends, for which native threads must not be at work; it is handed the value.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


class Ending:
    """Decides what happens when the script ends, and with which exit code.

    What a `sys.exit` or `raise SystemExit` carries is nobody's to see here: whoever waits for the process has it.

    Args:
        finished: called when the script has ended without an exception, or by a SystemExit; gives the exit code that
            the process has to have, None: the one that the script wants.
        failed: called with (code, message, traceback, signature) when it has ended by another exception.
        at_once: called last; True if the process has to end without the interpreter's own teardown.
        advice: called with such an exception; what its traceback should say besides, empty: nothing.
    """

    def __init__(
        self,
        finished: Callable[[], int | None],
        failed: Callable[[int, str, str, str], None],
        at_once: Callable[[], bool],
        advice: Callable[[BaseException], str] = lambda _: "",
    ) -> None:
        self._finished = finished
        self._failed = failed
        self._at_once = at_once
        self._advice = advice
        self._owner = os.getpid()
        self._outermost = _outermost_code()
        self.code: int | None = None
        "exit code that the process has to have; None: the script is running, or ends with the one that it wants"

    def install(self) -> None:
        """Take over `sys.excepthook` and the process end; call before the script registers its own."""
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._advise(error)
        if isinstance(error, FallowError):
            print(f"fallow: {error.message}", file=sys.stderr)  # noqa: T201
        else:
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        self._tell(error, trace)

    def _tell(self, error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, FallowError):
            self.code = int(error.code)
            self._failed(self.code, error.message, "", signature_of(error, trace))
        else:
            self.code = 1
            text = "".join(traceback.format_exception(type(error), error, trace))
            self._failed(1, f"{type(error).__name__}: {error}", text, signature_of(error, trace))

    def _look_at_exception(self) -> None:
        """The script may have put a hook of its own in the place of ours."""
        error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        if self.code is None and error is not None and trace is not None and trace.tb_frame.f_code is self._outermost:
            self._advise(error)
            self._tell(error, trace)

    def _advise(self, error: BaseException) -> None:
        if advice := self._advice(error):
            error.add_note(advice)

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        self._look_at_exception()
        if self.code is None:
            try:
                self.code = self._finished()
            except FallowError as error:
                self._on_exception(FallowError, error, None)
        # Python itself would exit with 1 after an exception, whatever its code.
        at_once = (self.code or 0) > 1 or self._at_once()
        if self.code is None and at_once:
            leave_things_be(self)
        if self.code is None or not at_once:
            return
        # What the script and its libraries registered still runs; only the teardown is left out.
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code)
