"""What a checkpoint's folder holds, by which a complete one is known. Imports no torch: the head reads it, too.

gGGGGGGGG-sSSSSSSSSSSSS.tmp/    being written; the suffix goes when everything below is there
    __RANK_0.distcp             one part of the tensors, in the format of torch.distributed.checkpoint
    extra.distcp                extra state of modules as Fallow reads it; then what is no tensor, as torch reads it
    part-RANK.json              what is in it; its last act
gGGGGGGGG-sSSSSSSSSSSSS/
    __RANK_0.distcp ...
    manifest                    SHA-256 of the lines below it, then JSON: sizes and digests of every file above
    .metadata                   torch's own index (a pickle: for torch's tools, Fallow never reads it); comes last
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
"A folder that is being deleted."
FORMAT = 2
LARGEST_MANIFEST = 1 << 30
_NAME = re.compile(r"^g(\d{8,})-s(\d{12,})$")


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state."""

    name: str
    "unique; the parts of `path` with dots between"
    path: list[str | int]
    "place in the tree that torch's tools rebuild: str is a key, int a place in a list"
    dtype: str
    shape: list[int]
    aliases: list[list[str | int]] = []
    "further places of a tied tensor, for torch's tools"


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the file `EXTRA`."""

    path: list[str | int]
    "as in `TensorInfo`; empty: all extra state, as `state.to_bytes` gives it"
    offset: int
    length: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Rows [first, end) of a tensor, and where a file holds them (a scalar counts as one row)."""

    tensor: int
    first: int
    end: int
    file: str = ""
    "none before it is written"
    offset: int = 0
    length: int = 0


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileInfo":
        """Read the file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(name=path.name, size=file.tell(), sha256=digest)


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`part-RANK.json`: one member's contribution is complete."""

    outline: str
    "SHA-256 over all tensors' names, dtypes and shapes: equal on all members, or they wrote different states"
    files: list[FileInfo]
    chunks: list[Chunk]
    extra: list[Extra]
    "of the first rank"
    modes: list[str] | None
    "what is frozen and what rests on that member, see `prepared.modes`"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    format: int
    generation: int
    step: int
    "finished optimizer steps"
    epoch: int
    world: int
    "members that wrote it; any number can load it"
    written_at: float
    "Unix time of the snapshot"
    asked: bool
    "somebody asked for this one by hand: it is kept until it is deleted by hand"
    tensors: list[TensorInfo]
    chunks: list[Chunk]
    files: list[FileInfo]
    extra: list[Extra] = []
    modes: list[str] | None = None
    "what the members had frozen and what rested, see `prepared.modes.common`"


def folder_name(generation: int, step: int) -> str:
    """Name of a complete checkpoint's folder; sorts by age."""
    return f"g{generation:08d}-s{step:012d}"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write the file into a checkpoint's folder; returns its digest, which stands for the whole checkpoint."""
    body = msgspec.json.encode(manifest)
    digest = hashlib.sha256(body).hexdigest()
    write_private(folder / MANIFEST, digest.encode() + b"\n" + body)
    return digest


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """What the checkpoint in `folder` says of itself, and its digest. Its other files are not looked at.

    Raises:
        FallowError: there is none, it is damaged, or others could have written it.
    """
    try:
        check_dir(folder)
        data = read_private(folder / MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError as error:
        raise damaged(folder, f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise damaged(folder, f"{MANIFEST} cannot be read: {error.strerror}") from None
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise damaged(folder, f"{MANIFEST} does not match its SHA-256: it is torn or was changed")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(folder, f"{MANIFEST}: {error}") from None
    if manifest.format != FORMAT:
        raise damaged(folder, f"its format is {manifest.format}, this Fallow reads {FORMAT}")
    return manifest, digest.decode()


def announcement(folder: Path, manifest: Manifest, digest: str) -> Checkpoint:
    """What the head should hear of a complete checkpoint."""
    return Checkpoint(
        generation=manifest.generation,
        step=manifest.step,
        epoch=manifest.epoch,
        path=str(folder),
        digest=digest,
        nbytes=sum(file.size for file in manifest.files),
        written_at=manifest.written_at,
        by_hand=manifest.asked,
    )


def complete_ones(folder: Path) -> list[Path]:
    """Folders of all complete checkpoints below `folder`, oldest first."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    except FileNotFoundError:
        return []


def damaged(folder: Path, why: str) -> FallowError:
    """The error for a checkpoint that must not be used."""
    return FallowError(f"checkpoint {folder} cannot be used: {why}", Exit.DATA)
