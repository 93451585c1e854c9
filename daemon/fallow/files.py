"""Every path that Fallow uses, and private files: 0700 folders, 0600 files, checked before use.

State is on a file system that compute nodes can read, often one that colleagues can see too. So nothing is
read or written before `lstat` says that it is ours and closed to others, files are opened without following
links, and writes are atomic and durable (temporary file, fsync, rename, fsync of the folder).
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from fallow.model import ID_PATTERN, Exit, FallowError

T = TypeVar("T")

SOCKET_PATH_LIMIT = 108
"Linux: sizeof(sockaddr_un.sun_path), with the closing NUL."
READ_LIMIT = 64 * 1024 * 1024
_ELSEWHERE = "set FALLOW_STATE_DIR, or XDG_RUNTIME_DIR for sockets, to a folder of yours"
_PROBE = 16 * 1024
"Bytes of the file that tests whether a folder can be written to."
_LAST_WORDS = 300
_REMEDIES = {
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room within your quota",
    errno.EROFS: "its file system must be mounted for writing",
    errno.ENOENT: "make the folder, or put it back",
    errno.ENOTDIR: "it must be a folder",
    errno.EACCES: "give yourself access to it",
}

_ID = re.compile(ID_PATTERN)
_NETWORK_TYPES = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs"),
    *("panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
}
_NETWORK_FUSE = {"ceph", "daos", "dfuse", "gcsfuse", "glusterfs", "juicefs", "rclone", "s3fs", "sshfs"}


class UnsafePath(FallowError):
    """A file or folder that somebody else could have made or could change."""

    def __init__(self, path: Path, what: str, advice: str) -> None:
        super().__init__(f"{path}: {what}; {advice}", Exit.NOPERM)
        self.path = path


def unreadable(path: Path, error: OSError, remedy: str = "see to its file system") -> UnsafePath:
    """What to tell of a file or folder that cannot be read. A lack of rights has a remedy of its own."""
    if error.errno == errno.EACCES:
        remedy = "check the owner and mode of the folders above it, and that this host sees them as yours"
    return UnsafePath(path, f"cannot be read ({error.strerror})", remedy)


def check_id(text: str) -> str:
    """Return `text` if it may become a job name, file name and Redis key; else raise."""
    if _ID.fullmatch(text) is None:
        raise FallowError(
            f"{text[:80]!r} is no valid id; use 1 to 64 of A-Z a-z 0-9 . _ - and begin with none of . -",
            Exit.USAGE,
        )
    return text


# --------------------------------------------------------------------------------------------------------
# Paths
# --------------------------------------------------------------------------------------------------------


class RunPaths:
    """Folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.script, self.report = root / "script", root / "report.json"
        self.keys, self.logs = root / "keys", root / "logs"
        self.checkpoints, self.ledger = root / "checkpoints", root / "ledger"
        self.stand_in_log = root / "head.log"
        "log of the heads that the run's agents have started"

    def key(self, token: str) -> Path:
        return self.keys / f"{check_id(token)}.json"

    def base_job(self, token: str) -> Path:
        """What `fallow submit` leaves where it cannot tell the head."""
        return self.keys / f"{check_id(token)}.job"

    def log(self, worker: str) -> Path:
        return self.logs / f"{check_id(worker)}.log"

    def output(self, token: str) -> Path:
        """Of a job that the head submitted."""
        return self.logs / f"{check_id(token)}.out"

    def create(self) -> "RunPaths":
        """Make the run's folders (private) where they are missing."""
        for folder in (self.root, self.keys, self.logs, self.checkpoints, self.ledger):
            private_dir(folder)
        return self


class Paths:
    """State folder (shared file system) and runtime folder (this host) of one head."""

    def __init__(self, state: Path, runtime: Path) -> None:
        self.state, self.runtime = state, runtime
        self.runs, self.redis_dir = state / "runs", state / "redis"
        self.head_file, self.head_key, self.term = state / "head.json", state / "head.key", state / "term"
        self.head_wanted = state / "head.wanted"
        "a head that is starting leaves this file to ask a stand-in head to give way"
        self.head_config = state / "head-config.json"
        "the newest head's configuration, with which a stand-in head serves"

    @classmethod
    def default(cls, environ: Mapping[str, str] = os.environ) -> "Paths":
        """The paths that the environment asks for. Makes nothing; call `create` before use."""
        base = base_folder(environ, "XDG_STATE_HOME") or Path("~/.local/state")
        folder = Path(environ.get("FALLOW_STATE_DIR") or base / "fallow")
        try:
            state = folder.expanduser().absolute()
        except RuntimeError as error:
            text = f"{folder}: that home folder is not known; set FALLOW_STATE_DIR to a path that begins with /"
            raise FallowError(text, Exit.CONFIG) from error
        return cls(state=state, runtime=_default_runtime(state, environ))

    def create(self) -> "Paths":
        """Make the folders (private) where they are missing and check those that exist."""
        for folder in (self.state, self.redis_dir, self.runs, self.runtime):
            private_dir(folder)
        return self

    def head_lease(self, number: int) -> Path:
        """The file by which the head of that number shows that it lives (`head.state.lease`)."""
        return self.state / f"head.lease.{number}"

    @property
    def head_leases(self) -> list[Path]:
        """Those files, of the heads that have not ended well."""
        return [path for path in self.state.glob("head.lease.*") if path.suffix[1:].isdecimal()]

    @property
    def control(self) -> Path:
        return _socket_path(self.runtime / "control.sock")

    @property
    def redis_socket(self) -> Path:
        return _socket_path(self.runtime / "redis.sock")

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(self.runs / check_id(run_id))


def base_folder(environ: Mapping[str, str], variable: str) -> Path | None:
    """The folder that a variable such as XDG_STATE_HOME names; None: it names none.

    A relative path counts as none (XDG Base Directory Specification): it would be another folder for each command.
    """
    named = environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else None


def _default_runtime(state: Path, environ: Mapping[str, str]) -> Path:
    # One runtime folder per state folder, so that heads with different states never meet on a socket.
    tag = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    base = base_folder(environ, "XDG_RUNTIME_DIR")
    if base is not None and os.path.isdir(base) and os.access(base, os.W_OK):
        runtime = base / f"fallow-{tag}"
        # Sites give jobs long names for temporary folders.
        if len(os.fsencode(runtime / "control.sock")) < SOCKET_PATH_LIMIT:
            return runtime
    # A name that others can guess in a shared /tmp is safe because `private_dir` refuses what is not ours.
    return Path("/tmp") / f"fallow-{os.getuid()}-{tag}"  # noqa: S108


def _socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) >= SOCKET_PATH_LIMIT:
        raise FallowError(
            f"{path}: too long for a Unix socket ({SOCKET_PATH_LIMIT - 1} bytes at most); "
            "set XDG_RUNTIME_DIR to a shorter path",
            Exit.CONFIG,
        )
    return path


# --------------------------------------------------------------------------------------------------------
# Private folders and files
# --------------------------------------------------------------------------------------------------------


def private_dir(path: Path) -> Path:
    """Make `path` (0700, missing parents too) and check that it is ours, closed and no link."""
    path = Path(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return check_dir(path)
    try:
        for folder in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    except OSError as error:
        raise FallowError(
            f"{path}: cannot make this folder ({error.strerror}); {_ELSEWHERE}",
            Exit.CANTCREAT,
        ) from error
    return check_dir(path)


def check_dir(path: Path) -> Path:
    """Check that a folder is ours, closed to others and no link. `FileNotFoundError` passes through."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafePath(path, "is not a folder (or is a symbolic link)", "name the real folder or remove it")
    _check_owner(path, status, "chmod 700")
    for parent in path.resolve().parents:
        if _open_to_a_crowd(parent.stat()):
            raise UnsafePath(path, f"others can write to {parent} above it", "choose a place inside your own folders")
    return path


def _open_to_a_crowd(parent: os.stat_result) -> bool:
    """Return True if people that the user has no reason to trust can move a folder in `parent` away.

    Whoever can write to a folder above ours can put another one in our place, but cannot read or write what is in ours.
    Every file of ours is checked when it is opened, so that a folder put there is refused. The owners of the folders
    above are trusted, and a group that the user is in: project folders have mode 2770. Everybody is not.
    """
    if parent.st_mode & stat.S_ISVTX:
        return False
    if parent.st_mode & stat.S_IWOTH:
        return True
    trusted = parent.st_uid in (0, os.getuid()) or parent.st_gid in (os.getegid(), *os.getgroups())
    return bool(parent.st_mode & stat.S_IWGRP) and not trusted


def _check_owner(path: Path, status: os.stat_result, remedy: str) -> None:
    if status.st_uid != os.getuid():
        raise UnsafePath(path, f"belongs to uid {status.st_uid}, not to you", _ELSEWHERE)
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafePath(path, f"is open to others (mode {mode:04o})", f"look at it, then {remedy} it")


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, atomically and durably, mode 0600. Its folder must exist.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_dir(path.parent)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def unwritable() -> Iterator[None]:
    """Turn an error of the file system into one for the user, which names the file and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see to its file system")
        raise FallowError(f"{error.filename}: cannot be written ({error.strerror}); {remedy}", Exit.IOERR) from error


def write_problem(folder: Path) -> str:
    """Why nothing can be written into `folder`, with its name and what to do; empty: a test file could be written."""
    path = folder / f".probe.{os.getpid()}"
    try:
        write_private(path, bytes(_PROBE))
        path.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return f"{folder}: {reason}; {_REMEDIES.get(error.errno or 0, 'make the folder writable again')}"
    return ""


def sync_dir(path: Path) -> None:
    """Make what happened to the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_private(path: Path) -> int:
    """Descriptor of a file of ours (0600) for appending; it is made where it is missing. No link is followed."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_private(path: Path) -> BinaryIO:
    """Open a file that only we could have written, for reading. `FileNotFoundError` passes through."""
    try:
        # O_NONBLOCK: somebody's FIFO under this name must not stop us before the check.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error, "it must be your own regular file") from error
    file = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath(path, "is not a regular file", "remove it")
        _check_owner(path, status, "chmod 600")
    except BaseException:
        file.close()
        raise
    return file


def read_private(path: Path, limit: int = READ_LIMIT) -> bytes:
    """Content of a file that only we could have written. `FileNotFoundError` passes through."""
    with open_private(path) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:  # a stale handle of NFS
            raise unreadable(path, error) from error
    if len(data) > limit:
        raise FallowError(f"{path}: larger than {limit} bytes; it is not a file of Fallow's, move it away", Exit.DATA)
    return data


def last_words(log: Path) -> str:
    """The last line of what a program wrote, as much of it as a person reads."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:_LAST_WORDS] if lines else "it said nothing"


def write_struct(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as a private JSON file."""
    write_private(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_struct(path: Path, kind: type[T]) -> T:
    """Read a struct from a private JSON file. `FileNotFoundError` passes through."""
    try:
        return msgspec.json.decode(read_private(path), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FallowError(f"{path}: not a valid {kind.__name__} ({error}); remove it", Exit.DATA) from error


def shipped(kind: str) -> Path:
    """The folder of files that come with Fallow: `examples`, `traces` or `systemd`; of a source tree, its own."""
    package = Path(__file__).parent
    installed = package / kind
    return installed if installed.is_dir() else package.parents[1] / "contrib" / kind


# --------------------------------------------------------------------------------------------------------
# File systems
# --------------------------------------------------------------------------------------------------------


def network_filesystem(path: Path, mounts: str = "/proc/self/mountinfo") -> str | None:
    """Type of the network file system that holds `path` (nfs4, lustre, ...); None when local or unknown."""
    target = os.path.realpath(path)
    best, fs_type = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return None
    for line in lines:
        mount, _, right = line.partition(" - ")
        fields, kinds = mount.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # Not shorter: of two mounts on one point the later one is on top.
        if inside and len(point) >= len(best):
            best, fs_type = point, kinds[0]
    name = fs_type.removeprefix("fuse.")
    return fs_type if fs_type in _NETWORK_TYPES or (name != fs_type and name in _NETWORK_FUSE) else None
