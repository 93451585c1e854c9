"""Durable checkpoints: one file, complete or absent, checked before use.

Layout: magic line; length of the header (8 bytes, little endian); header (MessagePack, with the SHA-256 of what
follows); the state's tree; the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import torch

from fallow.model import Exit, FallowError
from fallow.worker.state import Encoded, TensorSpec, as_bytes, decode, dtype_named, encode

_MAGIC = b"FALLOW-CHECKPOINT-1\n"
_NAME = re.compile(r"^g(\d{8})-s(\d{12})\.ckpt$")
_KEEP = 2


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read without the tensors."""

    sha256: str
    generation: int
    step: int
    epoch: int
    tree_bytes: int
    tensors: list[TensorSpec]


def save(folder: Path, generation: int, step: int, epoch: int, state: Any) -> tuple[Path, str]:
    """Write `state` to `folder` durably and remove all but the two newest checkpoints.

    Returns:
        The file's path and the SHA-256 of its content.

    Raises:
        FallowError: the file cannot be written.
    """
    encoded, tensors = encode(state, "checkpoint")
    total = hashlib.sha256(encoded.tree)
    for tensor in tensors:
        total.update(as_bytes(tensor).numpy().data)
    header = msgspec.msgpack.encode(
        Header(
            sha256=total.hexdigest(),
            generation=generation,
            step=step,
            epoch=epoch,
            tree_bytes=len(encoded.tree),
            tensors=encoded.tensors,
        )
    )
    path = folder / f"g{generation:08d}-s{step:012d}.ckpt"
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header + encoded.tree)
            for tensor in tensors:
                file.write(as_bytes(tensor).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_folder(folder)
        _remove_old(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise FallowError(
            f"checkpoint {path} cannot be written: {error.strerror}; check space and quota of the state folder",
            Exit.IOERR,
        ) from None
    return path, total.hexdigest()


def load(path: Path) -> Any:
    """Read a checkpoint's state.

    Raises:
        FallowError: the file is missing, incomplete or changed.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(file, path)
            total = hashlib.sha256()
            tree = file.read(header.tree_bytes)
            total.update(tree)
            tensors: list[torch.Tensor] = []
            for spec in header.tensors:
                data = bytearray(file.read(spec.nbytes))
                total.update(data)
                if len(data) != spec.nbytes:
                    raise _bad(path, "it is shorter than its header says")
                flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                tensors.append(flat.view(dtype_named(spec.dtype)).reshape(spec.shape))
    except OSError as error:
        raise FallowError(f"checkpoint {path} cannot be read: {error.strerror}", Exit.NOINPUT) from None
    if total.hexdigest() != header.sha256:
        raise _bad(path, "its SHA-256 does not match")
    return decode(Encoded(tree=tree, tensors=header.tensors), tensors)


def peek(path: Path) -> Header:
    """Read the header only. Raises FallowError if it is not a checkpoint."""
    try:
        with path.open("rb") as file:
            return _read_header(file, path)
    except OSError as error:
        raise FallowError(f"checkpoint {path} cannot be read: {error.strerror}", Exit.NOINPUT) from None


def _read_header(file: Any, path: Path) -> Header:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _bad(path, "it does not begin as one")
    length = int.from_bytes(file.read(8), "little")
    try:
        return msgspec.msgpack.decode(file.read(min(length, 1 << 28)), type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(path, str(error)) from None


def _bad(path: Path, why: str) -> FallowError:
    return FallowError(f"checkpoint {path} is damaged: {why}; name an older one", Exit.DATA)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder: Path) -> None:
    complete = sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    for path in complete[:-_KEEP]:
        path.unlink(missing_ok=True)
