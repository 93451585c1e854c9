"""Draws `fallow top` on its make-believe cluster, for the README. `make picture` writes docs/images/top.svg."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fallow.model import EventRecord, Snapshot
from fallow_tui.app import TopApp
from fallow_tui.demo import DemoCluster

FILE = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
SIZE = (110, 36)
START = 1_790_000_000.0
STORY_S = 330
"""Seconds of the cluster's story before the picture."""


class StillSource:
    """Tells the story up to one moment, and nothing more."""

    name = "demo"

    def __init__(self, cluster: DemoCluster) -> None:
        self._cluster = cluster
        self.now = 0.0
        self.told = asyncio.Event()

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        yield self._cluster.snapshot()
        for _ in range(STORY_S):
            for event in self._cluster.advance():
                yield event
            self.now += 1.0
            yield self._cluster.snapshot()
        self.told.set()
        await asyncio.Event().wait()

    async def call(self, method: str, **params: Any) -> None:
        raise NotImplementedError("a picture takes no requests")


async def draw() -> str:
    """The picture as SVG, without references to anything outside of it."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    source = StillSource(DemoCluster(start=START))
    app = TopApp(source, monotonic=lambda: source.now, wall=lambda: START + source.now)
    async with app.run_test(size=SIZE) as pilot:
        await source.told.wait()
        await pilot.pause()
        app.draw()
        await pilot.pause()
        picture = app.export_screenshot(title="fallow top")
    # Textual asks a server on the Internet for its font; the reader's own will do.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code", "ui-monospace, Menlo, Consolas")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(asyncio.run(draw()), encoding="utf-8")
    print(FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE, file=sys.stderr)
