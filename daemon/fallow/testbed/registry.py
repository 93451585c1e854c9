"""Registry of the testbeds, in which `down` finds what `up` started: the state folder has a link to each testbed.

A testbed lives on one host, but hosts may share the state folder. So each host has a folder of links.
"""

import contextlib
import hashlib
import os
import socket
from pathlib import Path

from fallow.files import Paths, private_dir, read_struct, write_struct
from fallow.testbed.conf import Layout

RECORD = "testbed.json"
"""The file in a testbed's folder that holds its layout. `down` removes only a folder that has one."""


def read_layout(folder: Path) -> Layout | None:
    """The layout of the testbed in a folder; None if the folder has no testbed."""
    try:
        return read_struct(folder / RECORD, Layout)
    except (FileNotFoundError, NotADirectoryError):
        return None


def remember(layout: Layout) -> None:
    """Write the layout into its folder, and the folder into the registry."""
    write_struct(layout.folder / RECORD, layout)
    forget(layout.folder)
    _link(layout.folder).symlink_to(layout.folder)


def forget(folder: Path) -> None:
    """Take a folder out of the registry."""
    _link(folder).unlink(missing_ok=True)


def layouts() -> list[Layout]:
    """All testbeds of this user, state folder and host, oldest first. Removes links to missing folders."""
    existing = []
    for link in _home().glob("*.link"):
        with contextlib.suppress(FileNotFoundError):  # another process has just taken it down
            folder = link.readlink()
            layout = read_layout(folder)
            if layout is None:
                forget(folder)
            else:
                existing.append(layout)
    return sorted(existing, key=lambda layout: layout.started_at)


def _home() -> Path:
    return private_dir(Paths.default().state / "testbeds" / socket.gethostname())


def _link(folder: Path) -> Path:
    return _home() / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.link"
