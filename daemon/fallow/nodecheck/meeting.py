"""Where workers meet when there is no head: files in a folder that all nodes see."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from fallow.files import write_private

_POLL_S = 0.05


class FolderGathers:
    """Gathers of `size` participants (`worker.transport.rendezvous.Gathers`).

    Args:
        folder: belongs to this user, and to one meeting.
        place: this participant's, from 0.
        size: how many there are.
    """

    def __init__(self, folder: Path, place: int, size: int) -> None:
        self._folder, self._place, self._size = folder, place, size

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """This participant's part. `within_node` means nothing here: all are asked to take part."""
        write_private(self._file(key, self._place), part)

    def parts(self, key: str, timeout_s: float) -> list[bytes] | None:
        """All parts by place; None: not all have come within `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while self.missing(key):
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)
        return [self._file(key, place).read_bytes() for place in range(self._size)]

    def missing(self, key: str) -> list[int]:
        """Places whose part has not come."""
        there = {*self._folder.iterdir()}
        return [place for place in range(self._size) if self._file(key, place) not in there]

    def _file(self, key: str, place: int) -> Path:
        return self._folder / hashlib.sha256(f"{place} {key}".encode()).hexdigest()
