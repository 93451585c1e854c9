"""How a script ended is told as it is: in a process of its own, since it is about the interpreter's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
from fallow.worker.process import Ending
def tell(*words):
    print(*words, flush=True)
def init():
    def failed(code, text, trace, signature):
        tell("failed", code, text)
    Ending(lambda: tell("finished"), failed, lambda: True).install()
"""

FORMS = {
    "init()": (0, "finished"),
    "init(); sys.exit(0)": (0, "finished"),
    "init(); raise SystemExit": (0, "finished"),
    "init(); raise SystemExit(3)": (3, "failed 3 the script ended with exit code 3"),
    "init(); exit(4)": (4, "failed 4 the script ended with exit code 4"),
    "from sys import exit as leave; init(); leave(5)": (5, "failed 5 the script ended with exit code 5"),
    "def main():\n    init()\n    return 2\nsys.exit(main())": (2, "failed 2 the script ended with exit code 2"),
    "init(); raise SystemExit('no data')": (1, "failed 1 the script ended with exit code 1: no data"),
    "init(); sys.exit(-1)": (255, "failed 255 the script ended with exit code 255"),
    "init()\ntry:\n    sys.exit(7)\nexcept SystemExit as error:\n    assert error.code == 7": (0, "finished"),
    "init()\ntry:\n    sys.exit(7)\nfinally:\n    pass": (7, "failed 7 the script ended with exit code 7"),
    "init(); raise KeyError('x')": (1, "failed 1 KeyError: 'x'"),
    "init(); sys.excepthook = lambda *_: None; raise KeyError('x')": (1, "failed 1 KeyError: 'x'"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_end_is_told_with_its_own_code(form: str, tmp_path: Path) -> None:
    code, told = FORMS[form]
    script = tmp_path / "train.py"
    script.write_text(f"{BEGIN}\n{form}\n")
    environ = {**os.environ, "FALLOW_WORKER": "w0"}
    done = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (code, [told]), done.stderr
