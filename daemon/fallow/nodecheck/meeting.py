"""Where workers meet when there is no head: files in a folder that all nodes see."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from fallow.files import write_private
from fallow.model import KvOp, KvReply
from fallow.worker.transport.rendezvous import Ask

_POLL_S = 0.05


def folder_ask(folder: Path) -> Ask:
    """Answer rendezvous questions as a head does.

    Args:
        folder: belongs to this user, and to one meeting.
    """

    def ask(generation: int, op: KvOp, keys: list[str], value: bytes, timeout_s: float) -> KvReply:
        files = [folder / hashlib.sha256(f"{generation} {key}".encode()).hexdigest() for key in keys]
        if op is KvOp.SET:
            write_private(files[0], value)
            return KvReply(id=0, ok=True)
        end = time.monotonic() + (timeout_s if op is KvOp.GET else 0.0)
        while not (there := {*files} <= {*folder.iterdir()}) and time.monotonic() < end:
            time.sleep(_POLL_S)
        if op is KvOp.CHECK:
            return KvReply(id=0, ok=True, number=int(there))
        return KvReply(id=0, ok=there, values=[file.read_bytes() for file in files] if there else [])

    return ask
