"""Layout and manifest of a checkpoint's folder. Imports no torch, since the head reads manifests, too.

gGGGGGGGG-sSSSSSSSSSSSS.tmp/    being written; renamed once all files below exist
    __RANK_0.distcp             one part of the tensors, in the format of torch.distributed.checkpoint
    extra.distcp                extra state of modules, for Fallow; then all other objects, for torch's tools
    part-RANK.json              description of a part, written last
gGGGGGGGG-sSSSSSSSSSSSS/
    __RANK_0.distcp ...
    manifest                    SHA-256 of the following lines, then JSON: sizes and digests of every file above
    .metadata                   torch's index (a pickle, for torch's tools; Fallow never reads it), written last
"""

import hashlib
import re
from pathlib import Path

import msgspec

from fallow.core.membership.messages import Checkpoint
from fallow.files import check_dir, read_private, write_private
from fallow.model import Exit, FallowError

MANIFEST = "manifest"
EXTRA = "extra.distcp"
TEMPORARY = ".tmp"
REMOVED = ".old"
"Suffix of a folder that is being deleted."
FORMAT = 2
LARGEST_MANIFEST = 1 << 30
_NAME = re.compile(r"^g(\d{8,})-s(\d{12,})$")


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state."""

    name: str
    "unique name: the parts of `path`, joined by dots"
    path: list[str | int]
    "position in the tree that torch's tools rebuild: str is a key, int an index in a list"
    dtype: str
    shape: list[int]
    aliases: list[list[str | int]] = []
    "further positions of a tied tensor, for torch's tools"


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """One object in the file `EXTRA`."""

    path: list[str | int]
    "as in `TensorInfo`; empty: all extra state, encoded by `state.to_bytes`"
    offset: int
    length: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Rows [first, end) of a tensor, and their location in a file. A scalar counts as one row."""

    tensor: int
    first: int
    end: int
    file: str = ""
    "file name; empty before the chunk is written"
    offset: int = 0
    length: int = 0


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileInfo":
        """Read a file and compute its digest."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(name=path.name, size=file.tell(), sha256=digest)


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`part-RANK.json`: description of one member's complete part."""

    outline: str
    "SHA-256 over all tensors' names, dtypes and shapes; differs if members wrote different states"
    files: list[FileInfo]
    chunks: list[Chunk]
    extra: list[Extra]
    "objects in the file `EXTRA`; first rank only"
    modes: list[str] | None
    "what is frozen and what rests on this member, see `prepared.modes`"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    format: int
    generation: int
    step: int
    "finished optimizer steps"
    epoch: int
    world: int
    "number of members that wrote the checkpoint; any number can load it"
    written_at: float
    "Unix time of the snapshot"
    by_hand: bool = msgspec.field(name="asked")
    "True if a user requested the checkpoint: only a user deletes it"
    tensors: list[TensorInfo]
    chunks: list[Chunk]
    files: list[FileInfo]
    extra: list[Extra] = []
    modes: list[str] | None = None
    "what was frozen and what rested on all members, see `prepared.modes.common`"


def folder_name(generation: int, step: int) -> str:
    """Return the name of a complete checkpoint's folder. Names sort by age."""
    return f"g{generation:08d}-s{step:012d}"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write the manifest into a checkpoint's folder; returns its digest, which identifies the whole checkpoint."""
    body = msgspec.json.encode(manifest)
    digest = hashlib.sha256(body).hexdigest()
    write_private(folder / MANIFEST, digest.encode() + b"\n" + body)
    return digest


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Read the manifest in `folder`; returns the manifest and its digest. Does not read the other files.

    Raises:
        FallowError: the manifest is missing or damaged, or other users could have written it.
    """
    try:
        check_dir(folder)
        data = read_private(folder / MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError as error:
        raise damage_error(folder, f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise damage_error(folder, f"{MANIFEST} cannot be read: {error.strerror}") from None
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise damage_error(folder, f"{MANIFEST} does not match its SHA-256: it is incomplete or was changed")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damage_error(folder, f"{MANIFEST}: {error}") from None
    if manifest.format != FORMAT:
        raise damage_error(folder, f"its format is {manifest.format}, this version of Fallow reads {FORMAT}")
    return manifest, digest.decode()


def announcement(folder: Path, manifest: Manifest, digest: str) -> Checkpoint:
    """Return the worker's message to the head about a complete checkpoint."""
    return Checkpoint(
        generation=manifest.generation,
        step=manifest.step,
        epoch=manifest.epoch,
        path=str(folder),
        digest=digest,
        nbytes=sum(file.size for file in manifest.files),
        written_at=manifest.written_at,
        by_hand=manifest.by_hand,
    )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints below `folder`, oldest first."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def damage_error(folder: Path, why: str) -> FallowError:
    """Return the error for a checkpoint that must not be used."""
    return FallowError(f"checkpoint {folder} cannot be used: {why}", Exit.DATA)
