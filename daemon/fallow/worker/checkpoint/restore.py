"""Reading a checkpoint, with any number of members: every file's digest first, then its content."""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fallow.files import open_private
from fallow.model import Exit, FallowError
from fallow.worker.checkpoint.manifest import EXTRA, METADATA, Chunk, FileInfo, Manifest, damaged, read_manifest
from fallow.worker.checkpoint.parts import TREE
from fallow.worker.prepared.state import decode, dtype_named, from_bytes

_BLOCK = 64 << 20


def load_newest(paths: Sequence[str], unusable: Callable[[str, str], None], alive: Callable[[], None]) -> Any:
    """The state in the first of these checkpoints that can be used.

    Args:
        paths: folders, newest first.
        unusable: told of each one that was passed over: its path, and why.
        alive: called again and again, since it may take minutes.

    Returns:
        The state; None if there is no checkpoint at all.

    Raises:
        FallowError: there are some, but none can be used.
    """
    for path in paths:
        try:
            return load(Path(path), alive)
        except FallowError as error:
            why = error.message
            unusable(path, why)
    if paths:
        raise FallowError(
            f"{why}; and no older one is left. Nothing was trained from the beginning instead: put a good copy in its "
            "place and submit the run again, or begin a new run",
            Exit.DATA,
        )
    return None


def load(folder: Path, alive: Callable[[], None] = lambda: None) -> Any:
    """The state in a checkpoint's folder, for `transfer.load_state`. `alive`: see `load_newest`.

    Raises:
        FallowError: a file is missing, torn, changed, or could have been written by others; the text says which.
    """
    manifest, _ = read_manifest(folder)
    tensors = [torch.empty(info.shape, dtype=dtype_named(info.dtype), device="cpu") for info in manifest.tensors]
    filled = [0] * len(tensors)
    for file in manifest.files:
        if file.name == METADATA:
            continue  # torch's, for its own tools
        chunks = [chunk for chunk in manifest.chunks if chunk.file == file.name]
        try:
            _read_file(folder, file, chunks, tensors, alive)
        except FileNotFoundError:
            raise damaged(folder, f"{file.name} is missing") from None
        except OSError as error:
            raise damaged(folder, f"{file.name} cannot be read: {error.strerror}") from None
        for chunk in chunks:
            filled[chunk.tensor] += chunk.end - chunk.first
    _check_whole(folder, manifest, filled)
    tree = decode(tensors[-1].numpy().tobytes(), tensors[:-1])
    return {**tree, "modes": manifest.modes, "extra": _read_extra(folder, manifest)}


def _read_extra(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Extra state, from a file whose digest was checked."""
    own = next((blob for blob in manifest.extra if not blob.path), None)
    if own is None:
        return {}
    with open_private(folder / EXTRA) as source:
        source.seek(own.offset)
        extra: dict[str, Any] = from_bytes(source.read(own.length))
    return extra


def _read_file(
    folder: Path, file: FileInfo, chunks: list[Chunk], tensors: list[torch.Tensor], alive: Callable[[], None]
) -> None:
    with open_private(folder / file.name) as source:
        size = source.seek(0, 2)
        if size != file.size:
            raise damaged(folder, f"{file.name} has {size} bytes and not {file.size}: it is torn")
        if not size:
            return  # more members than there was to write
        with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest = hashlib.sha256()
            for at in range(0, size, _BLOCK):
                digest.update(data[at : at + _BLOCK])
                alive()
            if digest.hexdigest() != file.sha256:
                raise damaged(folder, f"{file.name} does not match its SHA-256: its content was changed")
            for chunk in chunks:
                alive()
                target = tensors[chunk.tensor]
                rows = target[chunk.first : chunk.end] if target.dim() else target
                try:
                    rows.copy_(_read_chunk(data[chunk.offset : chunk.offset + chunk.length]))
                except (RuntimeError, ValueError, EOFError) as error:
                    raise damaged(folder, f"{file.name}: {error}") from None


def _read_chunk(data: bytes) -> torch.Tensor:
    """One slice from a part's bytes; nothing but tensors is unpickled."""
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise ValueError("it holds no tensor")
    return found


def _check_whole(folder: Path, manifest: Manifest, filled: list[int]) -> None:
    for info, rows in zip(manifest.tensors, filled, strict=True):
        if rows != (info.shape[0] if info.shape else 1):
            raise damaged(folder, f"{info.name} is not all there")
    if not manifest.tensors or manifest.tensors[-1].name != TREE:
        raise damaged(folder, f"{TREE} is missing")
