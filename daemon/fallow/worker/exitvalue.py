"""The value with which the script ends the interpreter, told before the process is gone.

There is no hook for it: `sys.excepthook` is not called for a SystemExit, and `atexit` is told nothing. But the
interpreter asks the SystemExit that nobody caught for its `code`, outside of all frames, and that is seen here.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NoReturn


class ExitValue:
    """Sees every `sys.exit`, `exit` and `raise SystemExit` that ends the interpreter; none that is caught."""

    def __init__(self) -> None:
        self.value: Any = None
        "what the SystemExit carried; None: the script ended without one, or with one that carried nothing"

    @property
    def status(self) -> int:
        """The exit status that the interpreter makes of it."""
        if self.value is None:
            return 0
        return self.value & 0xFF if isinstance(self.value, int) else 1

    def install(self) -> None:
        """Look on from now on, for the life of the process; a second time changes nothing.

        Before Python 3.12 it has to be there before the script comes to `sys.exit(main())`, thus before `main`.
        """
        if sys.exit is _exit:
            return
        seen, attribute = self, SystemExit.__dict__["code"]

        class Code:
            def __get__(self, error: BaseException | None, kind: Any = None) -> Any:
                if error is None:
                    return self
                value = attribute.__get__(error, kind)
                if _asked_by_the_interpreter():
                    seen.value = value
                return value

            def __set__(self, error: BaseException, value: Any) -> None:
                attribute.__set__(error, value)

        # The type is immutable, its dictionary is not.
        gc.get_referents(SystemExit.__dict__)[0]["code"] = Code()
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

        # Before Python 3.12 the built-in one makes no exception object unless somebody catches it.
        plain = sys.exit
        sys.exit = _exit
        main = vars(sys.modules["__main__"])
        for name in [name for name, value in main.items() if value is plain]:
            main[name] = _exit


def _exit(status: Any = None, /) -> NoReturn:
    """As the built-in `sys.exit`."""
    raise SystemExit(status)


def _asked_by_the_interpreter() -> bool:
    """True if no Python code asks, in the attribute's getter."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


exit_value = ExitValue()
"""Of this process."""
