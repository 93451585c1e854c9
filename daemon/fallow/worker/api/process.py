"""What makes a process a worker: its channel to the agent, its signals and its end."""

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
"Beginnings of the names of threads that build and destroy groups."
_NATIVE_S = 3.0
_LIBRARY_PATHS = (str(Path(fallow.__file__).parent) + os.sep, *sysconfig.get_paths().values())
"Beginnings of file names that are not part of a user's script."


def session_with_agent(
    descriptor: str, *, grouped: bool = True, orphan_signal: signal.Signals = signal.SIGKILL
) -> "Session":
    """The conversation over the socket that this process has inherited as `descriptor`; it is not open yet.

    Args:
        descriptor: of the socket.
        grouped: see `Session`.
        orphan_signal: signal that ends this process if its agent ends before the session is closed. The kernel cannot
            send it (`die_with_parent`) if a shell is between the agent and this process.

    Raises:
        FallowError: there is no such socket.
    """
    from fallow.core.protocol import ToWorker
    from fallow.wire.frames import AgentChannel
    from fallow.worker.session.session import Session

    def connect(on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> AgentChannel:
        def end(reason: str) -> None:
            if not reason:
                os.kill(os.getpid(), orphan_signal)  # before the script hears of it, and fails with words of its own
            on_end(reason)

        return AgentChannel(int(descriptor), on_message, end)

    try:
        return Session(connect, grouped=grouped)
    except (OSError, ValueError) as error:
        raise FallowError(
            f"FALLOW_CHANNEL_FD={descriptor} is no socket to an agent ({error}). If torchrun or the like stands "
            "between `fallow run --` and the script, leave it out; to run the script by itself: unset FALLOW_WORKER",
            Exit.USAGE,
        ) from None


def die_with_parent() -> None:
    """Have the kernel kill this process when its agent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.TEMPFAIL)


def leave_sigterm_to_the_head(on_warning: Callable[[], None] = lambda: None) -> None:
    """Survive SIGTERM: Slurm sends it to the whole step, and the head releases this worker at a step boundary.

    The handler calls `on_warning`: where no head is there, this worker leaves by itself.
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
    """Have a crash, or the agent's signal before it kills a worker that hangs, write the stack to standard error.

    It is done inside the signal's handler, so it works while the interpreter is blocked.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=False)
        faulthandler.register(STACK_SIGNAL, all_threads=False, chain=False)


def _signature_of(error: BaseException, trace: TracebackType | None) -> str:
    """Type and place of an exception, the same wherever the same line of a script fails.

    The place is the innermost frame of the script's own: not Fallow's, and in no installed package.
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
    """Have the interpreter end with the script's exit value, which it alone knows, but tear as little down as it can.

    `root` stays as it is until the process is gone, with all that it refers to.
    """
    # One that comes back from native code while the interpreter goes would end the process by an abort.
    end = time.monotonic() + _NATIVE_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NATIVE_THREADS):
            thread.join(max(0.0, end - time.monotonic()))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(root))
    gc.freeze()
    # Runs in the place of libraries' own ends, for which native threads must not be at work; it is handed the value.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


class Ending:
    """Takes over `sys.excepthook` and the process end. Make it before the script registers its own.

    What a `sys.exit` or `raise SystemExit` carries is nobody's to see here: whoever waits for the process has it.
    """

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._owner = os.getpid()
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame.f_code
        "of the frame in which this thread's Python begins"
        self.code: int | None = None
        "exit code that the process has to have; None: the script is running, or ends with the one that it wants"
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
        # The script may have put a hook of its own in the place of ours.
        last, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        if self.code is None and last is not None and trace is not None and trace.tb_frame.f_code is self._outermost:
            self._report(last, trace, show=False)
        if self.code is None:
            try:
                self.code = self._run._finish()
            except FallowError as error:
                self._report(error, None, show=True)
        # Python itself would exit with 1 after an exception, whatever its code.
        at_once = (self.code or 0) > 1 or self._run._ends_at_once()
        if self.code is None and at_once:
            _skip_teardown(self)
        if self.code is None or not at_once:
            return
        # What the script and its libraries registered still runs; only the teardown is left out.
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code)
