"""`import fallow` stays cheap. That layers point one way is for `make lint`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "late"),
    [
        ("fallow", ("torch", "zmq", "redis", "textual")),
        ("fallow.model", ("torch", "zmq", "redis", "textual")),
        (
            "fallow.cli.main",
            ("torch", "zmq", "redis", "rich", "asyncio", "structlog", "numpy", "textual", "ClusterShell"),
        ),
        ("fallow.cli.export", ("torch", "zmq", "redis", "rich", "asyncio")),
        ("fallow_tui.app", ("torch", "zmq", "redis")),
        ("fallow.wire.frames", ("torch", "zmq", "redis")),
        pytest.param("fallow.worker.api.run", ("zmq", "redis"), id="a worker"),
    ],
)
def test_importing_does_not_import_what_is_not_needed_yet(module: str, late: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print(*(name for name in {late!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split() == []
