"""Reading a checkpoint, with any number of members: every file's digest first, then its content."""

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
from fallow.worker.checkpoint.manifest import EXTRA, FileInfo, damaged, read_manifest
from fallow.worker.checkpoint.parts import rows_of
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
    """The state in a checkpoint's folder, for `snapshot.load_state`. `alive`: see `load_newest`.

    Raises:
        FallowError: a file is missing, torn, changed, or could have been written by others; the text says which.
    """
    manifest, _ = read_manifest(folder)
    tensors = [torch.empty(info.shape, dtype=dtype_named(info.dtype), device="cpu") for info in manifest.tensors]
    rows, extra = Counter[int](), dict[str, Any]()
    for file in manifest.files:
        data = _checked_content(folder, file, alive)
        for chunk in manifest.chunks:
            if chunk.file == file.name:
                alive()
                part = data[chunk.offset : chunk.offset + chunk.length]
                try:
                    rows_of(tensors[chunk.tensor], chunk).copy_(_tensor(part))
                except (RuntimeError, ValueError, EOFError) as error:
                    raise damaged(folder, f"{file.name}: {error}") from None
                rows[chunk.tensor] += chunk.end - chunk.first
        for blob in manifest.extra:
            if file.name == EXTRA and not blob.path:
                extra = from_bytes(data[blob.offset : blob.offset + blob.length])
    for number, info in enumerate(manifest.tensors):
        if rows[number] != (info.shape[0] if info.shape else 1):
            raise damaged(folder, f"{info.name} is not all there")
    tree = decode(tensors[-1].numpy().tobytes(), tensors[:-1])  # see `parts.take`
    return {**tree, "modes": manifest.modes, "extra": extra}


def _checked_content(folder: Path, file: FileInfo, alive: Callable[[], None]) -> mmap.mmap | bytes:
    """A file's content, whose size and digest are as the manifest says."""
    try:
        with open_private(folder / file.name) as source:
            size = source.seek(0, 2)
            if size != file.size:
                raise damaged(folder, f"{file.name} has {size} bytes and not {file.size}: it is torn")
            if not size:
                return b""  # more members than there was to write
            data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise damaged(folder, f"{file.name} is missing") from None
    except OSError as error:
        raise damaged(folder, f"{file.name} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256()
    for at in range(0, size, _BLOCK):
        digest.update(data[at : at + _BLOCK])
        alive()
    if digest.hexdigest() != file.sha256:
        raise damaged(folder, f"{file.name} does not match its SHA-256: its content was changed")
    return data


def _tensor(data: bytes) -> torch.Tensor:
    """One slice from a part's bytes; nothing but tensors is unpickled."""
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise ValueError("it holds no tensor")
    return found
