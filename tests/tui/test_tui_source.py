"""The monitor's end of the real control socket."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tui_rig import START, event, snapshot

from fallow.control.server import ControlServer
from fallow.files import Paths, write_struct
from fallow.model import EventRecord, Exit, FallowError, HeadFile, Snapshot
from fallow_tui.source import HeadSource


class Head:
    """Answers as a head would, and then goes away."""

    async def handle(self, method: str, params: dict[str, Any]) -> Any:
        if method == "grow":
            raise FallowError(f"run {params['run']} is at its most", Exit.USAGE)
        return None

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        yield snapshot()
        yield event(1)


def _paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()


async def test_stream_and_calls_through_the_control_socket(tmp_path: Path) -> None:
    paths = _paths(tmp_path)
    server = ControlServer(paths.control, Head())
    await server.start()
    try:
        head = HeadFile(
            version="0.1.0",
            host=socket.gethostname(),
            pid=os.getpid(),
            term=1,
            endpoint="",
            public_key="",
            control=str(paths.control),
            started_at=START,
        )
        write_struct(paths.head_file, head)
        source = HeadSource(paths)
        assert [item async for item in source.subscribe()] == [snapshot(), event(1)]
        assert await source.call("cancel", run="digits-1") is None
        with pytest.raises(FallowError, match="digits-1 is at its most"):
            await source.call("grow", run="digits-1", by=1)
    finally:
        await server.close()
