"""The monitor's end of the real control socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tui_rig import event, snapshot

import builders
from fallow.control.server import ControlServer
from fallow.files import Paths, write_struct
from fallow.model import Exit, FallowError
from fallow_tui.source import HeadSource


class Head:
    """Answers as a head would."""

    async def handle(self, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "status":
                return snapshot(last_event=1)
            case "events":
                return [event(1)]
            case "grow":
                raise FallowError(f"run {params['run']} is at its most", Exit.USAGE)
        return None


async def test_stream_and_calls_through_the_control_socket(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()
    server = ControlServer(paths.control, Head().handle)
    await server.start()
    try:
        here = {"host": socket.gethostname(), "pid": os.getpid(), "control": str(paths.control)}
        write_struct(paths.head_file, builders.head_file(**here))
        source = HeadSource(paths)
        items = source.subscribe()
        assert [await anext(items) for _ in range(2)] == [snapshot(last_event=1), event(1)]
        assert await source.call("cancel", run="digits-1") is None
        with pytest.raises(FallowError, match="digits-1 is at its most"):
            await source.call("grow", run="digits-1", by=1)
    finally:
        await server.close()
