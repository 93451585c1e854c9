"""Draws `fallow top` on its make-believe cluster, for the README. `make picture` writes docs/images/top.svg."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

from fallow_tui.app import TopApp
from fallow_tui.demo import DemoSource

FILE = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
SIZE = (110, 36)
START = 1_790_000_000.0


async def draw() -> str:
    """The picture as SVG, without references to anything outside of it."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    # Its story up to the moment at which it would go on in real time.
    source = DemoSource(wall=lambda: START, tick_s=1e9)
    app = TopApp(source, monotonic=lambda: 0.0, wall=lambda: START)
    async with app.run_test(size=SIZE) as pilot:
        while app.view.snapshot is None or app.view.snapshot.at < START:
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
