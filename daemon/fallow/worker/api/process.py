"""Turns a process into a worker: its channel to the agent, its signals and its end."""

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
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import fallow
from fallow.core.membership.failures import DIVERGENCE, STRANGER, Divergence, Stranger
from fallow.model import STACK_SIGNAL, Exit, FallowError

if TYPE_CHECKING:
    from fallow.worker.api.run import Run
    from fallow.worker.session.session import Session

_PR_SET_PDEATHSIG = 1
_NATIVE_THREADS = ("build-", "reaper-")
"Name prefixes of the threads that build and destroy groups."
_NATIVE_S = 3.0
_LIBRARY_PATHS = (str(Path(fallow.__file__).parent) + os.sep, *sysconfig.get_paths().values())
"Path prefixes of Fallow and of installed packages, which are not part of a user's script."


def session_with_agent(
    descriptor: str, *, grouped: bool = True, orphan_signal: signal.Signals = signal.SIGKILL
) -> "Session":
    """Make the session over the socket that this process has inherited. The session is not open yet.

    Args:
        descriptor: file descriptor of the socket, as text.
        grouped: see `Session`.
        orphan_signal: signal that ends this process if its agent ends before the session is closed. The kernel cannot
            send it (`die_with_parent`) if a shell is between the agent and this process.

    Raises:
        FallowError: `descriptor` is no socket.
    """
    from fallow.core.protocol import ToWorker
    from fallow.wire.frames import AgentChannel
    from fallow.worker.session.session import Session

    def connect(on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> AgentChannel:
        def end(reason: str) -> None:
            if not reason:
                os.kill(os.getpid(), orphan_signal)  # before the script gets an error of its own
            on_end(reason)

        return AgentChannel(int(descriptor), on_message, end)

    try:
        return Session(connect, grouped=grouped)
    except (OSError, ValueError) as error:
        raise FallowError(
            f"FALLOW_CHANNEL_FD={descriptor} is no socket to an agent ({error}). Start the script directly after "
            "`fallow run --`, without torchrun or another launcher. To run the script alone, unset FALLOW_WORKER",
            Exit.USAGE,
        ) from None


def die_with_parent() -> None:
    """Have the kernel kill this process when its agent dies for any reason."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.TEMPFAIL)


def leave_sigterm_to_the_head(on_warning: Callable[[], None] = lambda: None) -> None:
    """Survive SIGTERM: Slurm sends it to all processes of a job, and the head releases this worker at a step boundary.

    The handler calls `on_warning`, so that this worker can leave by itself if the head is lost.
    """
    owner = os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked loader process: it ends as usual
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            on_warning()

    signal.signal(signal.SIGTERM, on_sigterm)


def enable_stack_dumps() -> None:
    """Write the stack to standard error after a crash, and on the signal that the agent sends before it kills a worker.

    The signal handler itself writes the stack, so this works while the interpreter is blocked.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=False)
        faulthandler.register(STACK_SIGNAL, all_threads=False, chain=False)


def _signature_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return type and place of an exception. Equal on all workers whose scripts fail in one line.

    The place is the innermost frame of the script, outside of Fallow and of installed packages.
    """
    if isinstance(error, Divergence):
        return DIVERGENCE + error.message
    if isinstance(error, Stranger):
        return STRANGER + error.message
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PATHS)]
    if not frames:
        return type(error).__name__
    last = (own or frames)[-1]
    return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}"


def _skip_teardown(root: object) -> None:
    """Let the interpreter end with the script's exit code, which only it knows, with as little teardown as possible.

    `root`, and all objects that it refers to, stay alive until the process ends.
    """
    # A thread that returns from native code during the interpreter's teardown would abort the process.
    end = time.monotonic() + _NATIVE_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NATIVE_THREADS):
            thread.join(max(0.0, end - time.monotonic()))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(root))
    gc.freeze()
    # Replaces the libraries' exit handlers, which are unsafe while native threads run. Receives the exit code.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


class Ending:
    """Handles `sys.excepthook` and the end of the process. Make it before the script registers its own handlers.

    The code of `sys.exit` or `raise SystemExit` is not visible here. The parent process gets the code.
    """

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._owner = os.getpid()
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame.f_code
        "code object of this thread's outermost Python frame"
        self.code: int | None = None
        "exit code that the process must have; None: the script runs, or chooses its exit code"
        sys.excepthook = lambda _, error, trace: self._report(error, trace, show=True)
        atexit.register(self._at_exit)

    def _report(self, error: BaseException, trace: TracebackType | None, *, show: bool) -> None:
        if advice := self._run._advice(error):
            error.add_note(advice)
        if isinstance(error, FallowError):
            self.code, message, text = int(error.code), error.message, ""
        else:
            self.code, message = 1, f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(type(error), error, trace))
        if show:
            sys.stderr.write(text or f"fallow: {message}\n")
        self._run._report_failure(self.code, message, text, _signature_of(error, trace))

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        # The script may have replaced `sys.excepthook`.
        last, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        if self.code is None and last is not None and trace is not None and trace.tb_frame.f_code is self._outermost:
            self._report(last, trace, show=False)
        if self.code is None:
            try:
                self.code = self._run._finish()
            except FallowError as error:
                self._report(error, None, show=True)
        # Python would exit with 1 after an exception, whatever `code` is.
        at_once = (self.code or 0) > 1 or self._run._ends_at_once()
        if self.code is None and at_once:
            _skip_teardown(self)
        if self.code is None or not at_once:
            return
        # Run the exit handlers of the script and its libraries; skip only the teardown.
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code)
