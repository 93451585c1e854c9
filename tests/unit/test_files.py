"""Private files refuse what somebody else could have made or could change."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from fallow.files import (
    Paths,
    UnsafePath,
    check_id,
    network_filesystem,
    private_dir,
    read_private,
    read_struct,
    write_private,
    write_struct,
)
from fallow.model import Exit, FallowError


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    a: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return private_dir(tmp_path / "private")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_private_dir_makes_all_levels_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_dir(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [mode(p) for p in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert private_dir(made) == made


def test_private_dir_refuses_what_is_not_ones_own_folder_and_says_why(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o750)
    (folder / "link").symlink_to("open")
    (folder / "file").touch(mode=0o600)
    for name, words, code in (
        ("open", r"open to others .*0750.*chmod 700", Exit.NOPERM),
        ("link", "not a folder", Exit.NOPERM),
        ("file", "not a folder", Exit.NOPERM),
        ("file/below", "cannot make this folder", Exit.CANTCREAT),
    ):
        with pytest.raises(FallowError, match=words) as caught:
            private_dir(folder / name)
        assert caught.value.code is code
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(UnsafePath, match="belongs to uid 12345"):
            private_dir(folder)


def test_private_dir_refuses_crowd_above(tmp_path: Path) -> None:
    crowd = tmp_path / "crowd"
    crowd.mkdir()
    crowd.chmod(0o777)
    with pytest.raises(UnsafePath, match="others can write"):
        private_dir(crowd / "mine")
    crowd.chmod(0o1777)
    (tmp_path / "home").symlink_to("crowd")
    assert private_dir(tmp_path / "home" / "mine").is_dir(), "through a link"


OWN_GROUP, FOREIGN_GROUP, COLLEAGUE = 4242, 4343, 4444


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "accepted"),
    [
        (COLLEAGUE, OWN_GROUP, 0o2770, True),
        (COLLEAGUE, OWN_GROUP, 0o777, False),
        (COLLEAGUE, FOREIGN_GROUP, 0o2770, False),
        (COLLEAGUE, FOREIGN_GROUP, 0o3770, True),
        (COLLEAGUE, FOREIGN_GROUP, 0o2750, True),
        (0, FOREIGN_GROUP, 0o2775, True),
        (0, FOREIGN_GROUP, 0o777, False),
    ],
)
def test_a_project_folder_of_a_group_that_one_is_in_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, group: int, mode: int, accepted: bool
) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [0, OWN_GROUP])
    project = tmp_path / "project"
    project.mkdir()
    os.chown(project, owner, group)
    project.chmod(mode)
    if accepted:
        made = private_dir(project / "me" / "fallow")
        assert stat.S_IMODE(made.stat().st_mode) & 0o777 == 0o700
    else:
        with pytest.raises(UnsafePath, match=r"others can write to .*project above it"):
            private_dir(project / "me" / "fallow")


def test_write_replaces_what_is_there_and_leaves_nothing_behind(folder: Path) -> None:
    (folder / "victim").write_bytes(b"precious")
    (folder / "f").symlink_to("victim")
    for text in (b"one", b"two"):
        write_private(folder / "f", text)
    assert read_private(folder / "f") == b"two"
    assert mode(folder / "f") == 0o600
    assert (folder / "victim").read_bytes() == b"precious"
    assert sorted(os.listdir(folder)) == ["f", "victim"]


def test_failed_write_keeps_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(folder / "f", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(folder / "f", b"new")
    monkeypatch.undo()
    assert read_private(folder / "f") == b"old"
    assert os.listdir(folder) == ["f"]


def test_read_refuses_link_fifo_open_and_large_files(folder: Path) -> None:
    write_private(folder / "f", b"x" * 11)
    (folder / "link").symlink_to("f")
    os.mkfifo(folder / "fifo", 0o600)
    (folder / "open").write_bytes(b"x")
    (folder / "open").chmod(0o644)
    for name in ("link", "fifo", "open"):
        with pytest.raises(UnsafePath):
            read_private(folder / name)
    with pytest.raises(FileNotFoundError):
        read_private(folder / "missing")
    with pytest.raises(FallowError, match="larger than 10 bytes"):
        read_private(folder / "f", limit=10)


def test_structs(folder: Path) -> None:
    write_struct(folder / "s", Sample(1))
    assert read_struct(folder / "s", Sample) == Sample(1)
    for bad in (b"", b"{", b'{"a": "x"}', b'{"a": 1, "b": 2}', b'{"a": "\xff"}', b"[" * 100_000):
        write_private(folder / "s", bad)
        with pytest.raises(FallowError, match="not a valid Sample"):
            read_struct(folder / "s", Sample)


def test_ids() -> None:
    for good in ("a", "0", "_x", "run-1.w0", "A" * 64):
        assert check_id(good) == good
    for bad in ("", ".", "..", "-x", "a/b", "a b", "a\n", "a\0", "é", "A" * 65, "$(id)", "*", "../../etc"):
        with pytest.raises(FallowError, match="no valid id"):
            check_id(bad)


def test_default_paths(tmp_path: Path) -> None:
    env = {"FALLOW_STATE_DIR": str(tmp_path / "s"), "XDG_RUNTIME_DIR": str(tmp_path)}
    paths = Paths.default(env)
    assert paths.state == tmp_path / "s"
    assert paths.runtime.parent == tmp_path
    assert paths.runtime.name.startswith("fallow-")
    assert Paths.default({**env, "FALLOW_STATE_DIR": str(tmp_path / "t")}).runtime != paths.runtime
    paths.create()
    run = paths.run("r").create()
    assert run.key("tok") == paths.state / "runs" / "r" / "keys" / "tok.json"
    assert run.log("n0").parent.is_dir()
    with pytest.raises(FallowError):
        paths.run("../x")
    with pytest.raises(FallowError, match="home folder is not known"):
        Paths.default({"FALLOW_STATE_DIR": "~nobody-of-this-name/s"})


def test_a_file_whose_file_system_fails_is_an_error_for_the_user() -> None:
    """As a stale handle of NFS is: this one is ours alone, and cannot be read at its beginning."""
    with pytest.raises(UnsafePath, match=r"/proc/self/mem: cannot be read \(Input/output error\)"):
        read_private(Path("/proc/self/mem"))


def test_relative_base_folders_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be other ones for the head than for a command in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    usual = Paths.default({})
    paths = Paths.default({"XDG_STATE_HOME": "here", "XDG_RUNTIME_DIR": "here"})
    assert (paths.state, paths.runtime) == (usual.state, usual.runtime)


def test_default_paths_without_anything_or_too_deep_for_sockets(tmp_path: Path) -> None:
    paths = Paths.default({"XDG_STATE_HOME": str(tmp_path)})
    assert paths.state == tmp_path / "fallow"
    assert str(paths.runtime).startswith(f"/tmp/fallow-{os.getuid()}-")
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for runtime in (tmp_path / "gone", deep):
        assert (
            Paths.default({"XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)}).runtime == paths.runtime
        )
    with pytest.raises(FallowError, match="too long for a Unix socket"):
        _ = Paths(tmp_path, deep).control
    assert len(os.fsencode(Paths(tmp_path, Path("/" + "x" * 90)).redis_socket)) < 108


def test_network_filesystem(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw shared:1 - ext4 /dev/a rw\n"
        "2 1 0:2 / /home rw - nfs4 server:/home rw\n"
        "3 2 0:3 / /home/me/scratch\\040x rw - lustre a rw\n"
        "4 2 0:4 / /home/me/local rw - xfs a rw\n"
        "5 2 0:5 / /home/me/ssh rw - fuse.sshfs a rw\n"
        "6 2 0:6 / /home/me/img rw - fuse.squashfuse a rw\n"
        "garbage\n"
    )

    kinds = {
        "/var/x": None,
        "/home/me/state": "nfs4",
        "/homework": None,
        "/home/me/scratch x/y": "lustre",
        "/home/me/local/y": None,
        "/home/me/ssh": "fuse.sshfs",
        "/home/me/img": None,
    }
    assert {path: network_filesystem(Path(path), str(mounts)) for path in kinds} == kinds
    assert network_filesystem(Path("/x"), str(tmp_path / "none")) is None
