"""Runs a command that dies with the process that started it: child_process.py PARENT COMMAND...

torchrun starts its scripts in new sessions, so they would outlive a killed torchrun. Run this file by its path, since
importing the package would take too long.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_NOT_FOUND = 127

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]}: cannot be started ({error.strerror})\n")
sys.exit(_NOT_FOUND)
