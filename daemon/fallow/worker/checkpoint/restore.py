"""Reads a checkpoint, whatever the number of members that wrote it. Verifies the digest of each file first."""

import hashlib
import io
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fallow.files import open_private
from fallow.model import Exit, FallowError
from fallow.worker.checkpoint.manifest import EXTRA, FileInfo, damage_error, read_manifest
from fallow.worker.checkpoint.parts import rows_of
from fallow.worker.prepared.state import decode, dtype_named, from_bytes

_BLOCK = 64 << 20


def load_newest(paths: Sequence[str], on_unusable: Callable[[str, str], None], on_progress: Callable[[], None]) -> Any:
    """Load the first checkpoint that is usable.

    Args:
        paths: folders, newest first.
        on_unusable: called with path and reason of each checkpoint that was skipped.
        on_progress: called repeatedly, since loading may take minutes.

    Returns:
        The state; None if `paths` is empty.

    Raises:
        FallowError: no checkpoint in `paths` is usable.
    """
    for path in paths:
        try:
            return load(Path(path), on_progress)
        except FallowError as error:
            why = error.message
            on_unusable(path, why)
    if paths:
        raise FallowError(
            f"{why}; and no older checkpoint is left. The run did not start from scratch instead. Restore a good copy "
            "of the checkpoint and submit the run again, or begin a new run",
            Exit.DATA,
        )
    return None


def load(folder: Path, on_progress: Callable[[], None] = lambda: None) -> Any:
    """Load the state in a checkpoint's folder, for `snapshot.load_state`. `on_progress`: see `load_newest`.

    Raises:
        FallowError: a file is missing, incomplete, changed, or could have been written by other users.
    """
    manifest, _ = read_manifest(folder)
    tensors = [torch.empty(info.shape, dtype=dtype_named(info.dtype), device="cpu") for info in manifest.tensors]
    rows, extra = Counter[int](), dict[str, Any]()
    for file in manifest.files:
        data = _checked_content(folder, file, on_progress)
        for chunk in manifest.chunks:
            if chunk.file == file.name:
                on_progress()
                part = data[chunk.offset : chunk.offset + chunk.length]
                try:
                    rows_of(tensors[chunk.tensor], chunk).copy_(_tensor(part))
                except (RuntimeError, ValueError, EOFError) as error:
                    raise damage_error(folder, f"{file.name}: {error}") from None
                rows[chunk.tensor] += chunk.end - chunk.first
        for blob in manifest.extra:
            if file.name == EXTRA and not blob.path:
                extra = from_bytes(data[blob.offset : blob.offset + blob.length])
    for number, info in enumerate(manifest.tensors):
        if rows[number] != (info.shape[0] if info.shape else 1):
            raise damage_error(folder, f"rows of {info.name} are missing")
    tree = decode(tensors[-1].numpy().tobytes(), tensors[:-1])  # see `parts.take`
    return {**tree, "modes": manifest.modes, "extra": extra}


def _checked_content(folder: Path, file: FileInfo, on_progress: Callable[[], None]) -> mmap.mmap | bytes:
    """Map a file after verifying its size and digest."""
    try:
        with open_private(folder / file.name) as source:
            size = source.seek(0, 2)
            if size != file.size:
                raise damage_error(folder, f"{file.name} has {size} bytes instead of {file.size}: it is incomplete")
            if not size:
                return b""  # the checkpoint had more members than rows
            data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise damage_error(folder, f"{file.name} is missing") from None
    except OSError as error:
        raise damage_error(folder, f"{file.name} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256()
    for at in range(0, size, _BLOCK):
        digest.update(data[at : at + _BLOCK])
        on_progress()
    if digest.hexdigest() != file.sha256:
        raise damage_error(folder, f"{file.name} does not match its SHA-256: its content was changed")
    return data


def _tensor(data: bytes) -> torch.Tensor:
    """Unpickle one chunk; only tensors are accepted."""
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(value, torch.Tensor):
        raise ValueError("it holds no tensor")
    return value
