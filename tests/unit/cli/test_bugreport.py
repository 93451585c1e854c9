"""`fallow bugreport`: what helps is in the archive, what is secret or personal is not."""

import asyncio
import json
import os
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from command_line import Fallow
from fallow.cli import bugreport, doctor
from fallow.core.checks.site import Check, Level
from fallow.files import Paths, write_private, write_struct
from fallow.model import Exit, FallowError, HeadFile
from fallow.threads import in_thread
from head_in_process import serving
from waiting import wait_for

KEY = "0123456789abcdefghij.-:+=^!/*?&<>()[]{}@"
"as long as a key of CURVE"
PATH = "/projects/a-project-with-a-long-name/fallow/head.json"
"""longer than a key, in the file of a run's keys"""
OWN_PATH = os.environ["PATH"]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A user `alice` with secrets in the environment, in a folder without a head. Nobody reads this host's journal."""
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FALLOW_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(home),
        "USER": "alice",
        "PATH": str(home),
        "FALLOW_STATE_DIR": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "FALLOW_HEAD__REDIS_URL": "rediss://alice:redis-password@redis",
        "WANDB_API_KEY": "wandb-secret",
        "PLAIN_VARIABLE": "plain-value",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "examine", lambda: [Check("x", Level.OK, f"{home}/x is fine")])
    return Paths.default()


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        entries = opened.getmembers()
        assert {(entry.uid, entry.uname, entry.mode) for entry in entries} == {(0, "", 0o600)}
        return {entry.name.partition("/")[2]: opened.extractfile(entry).read().decode() for entry in entries}  # type: ignore[union-attr]


def test_no_secret_and_no_name_of_the_user_is_in_the_archive(paths: Paths, tmp_path: Path, fallow: Fallow) -> None:
    run = paths.create().run("alice-train-1").create()
    write_private(paths.head_key, KEY.encode())
    write_private(run.keys / "alice-train-1.b0.json", json.dumps({"secret_key": KEY[::-1], "head_file": PATH}).encode())
    (tmp_path / "outside").write_text("key of somebody")
    (run.logs / "n1.log").symlink_to(tmp_path / "outside")
    run.stand_in_log.write_text(json.dumps({"event": "head.x", "key": KEY}) + "\n")
    run.log("n0").write_text(
        f"wandb-secret {KEY[::-1]} HF_TOKEN=token-of-hub\n{PATH}\n\x1b[31m{tmp_path}/home/alice/data\n"
        f"-----BEGIN PRIVATE KEY-----\npem-lines\n-----END PRIVATE KEY-----\nloss 0.5 on gpu01\n"
    )
    result = fallow("bugreport", "--output", "a.tar.gz")
    assert result.code == Exit.OK
    files = contents(tmp_path / "a.tar.gz")
    logs = {"runs/USER-train-1/logs/n0.log", "runs/USER-train-1/head.log"}
    assert set(files) == {"README.txt", "versions.json", "config.toml", "doctor.json", *logs}
    everything = "\n".join([*files, *files.values()])
    for secret in (KEY, KEY[::-1], "wandb-secret", "token-of-hub", "pem-lines", "redis-password", "plain-value"):
        assert secret not in everything
    assert "alice" not in everything and "key of somebody" not in everything and "\x1b" not in everything
    assert "loss 0.5 on gpu01" in files["runs/USER-train-1/logs/n0.log"]
    assert PATH in files["runs/USER-train-1/logs/n0.log"]
    assert "~/data" in files["runs/USER-train-1/logs/n0.log"]
    assert json.loads(files["doctor.json"])["checks"][0]["found"] == "~/x is fine"
    assert "rediss://***@redis" in files["config.toml"]
    assert json.loads(files["versions.json"])["fallow"]
    assert (tmp_path / "a.tar.gz").stat().st_mode & 0o777 == 0o600
    for words in ("no head is running", "doctor.json (", "n1.log: ", "tar tzf a.tar.gz", "host names"):
        assert words in result.out


def test_only_the_end_of_a_log_is_taken(paths: Paths, tmp_path: Path, fallow: Fallow) -> None:
    log = paths.create().run("r1").create().log("n0")
    log.write_text("cut-off " * bugreport.MOST_BYTES + "\nthe end\n")
    (paths.runs / "r1 before the change").mkdir()
    assert fallow("bugreport", "r1", "--output", "a.tar.gz").code == Exit.OK
    assert contents(tmp_path / "a.tar.gz")["runs/r1/logs/n0.log"].strip() == "the end"


def test_a_part_that_fails_or_hangs_is_left_out(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    hangs, answer = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        answer.wait()

    def start(call: Callable[[], Any], name: str) -> Future[Any]:
        """Whatever does not hang has ended, so that no busy machine makes it late."""
        future = in_thread(call, name)
        wait_for("it ends or hangs", lambda: future.done() or hangs.is_set())
        hangs.clear()
        return future

    monkeypatch.setattr(bugreport, "in_thread", start)
    monkeypatch.setattr(doctor, "examine", hang)
    monkeypatch.setattr(bugreport, "find_server", lambda: 1 / 0)
    monkeypatch.setattr(bugreport, "PART_S", 0.5)
    monkeypatch.setenv("FALLOW_HARVST__NICE", "1")
    result = fallow("bugreport", "r9", "--output", "a.tar.gz")
    answer.set()
    assert result.code == Exit.OK
    assert set(contents(tmp_path / "a.tar.gz")) == {"README.txt"}
    for words in ("doctor.json: no answer within 0.5 s", "division by zero", "did you mean harvest?", "begins with r9"):
        assert words in result.out


def test_nothing_is_overwritten_and_nothing_is_left_behind(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in ("mine", "missing/a.tar.gz"):
        result = fallow("bugreport", "--output", name)
        assert result.code == Exit.CANTCREAT
        assert f"{name}: cannot be made" in result.err
    assert (tmp_path / "mine").read_text() == "mine"

    def refuse(*_: object, **__: object) -> None:
        raise FallowError("no such run: x", Exit.NOINPUT)

    monkeypatch.setattr(bugreport, "ask", refuse)
    result = fallow("bugreport", "x")
    assert (result.code, "no such run" in result.err) == (Exit.NOINPUT, True)
    assert not list(tmp_path.glob("*.tar.gz"))


def test_a_head_that_does_not_answer_still_has_a_log(paths: Paths, tmp_path: Path, fallow: Fallow) -> None:
    (tmp_path / "head.txt").write_text("it hangs\n")
    paths.create()
    with (tmp_path / "head.txt").open("a") as log:
        head = subprocess.Popen(["/bin/sh", "-c", "read x # fallow daemon"], stdin=subprocess.PIPE, stderr=log)
    with head:
        about = HeadFile(
            version="1",
            host=socket.gethostname(),
            pid=head.pid,
            term=1,
            endpoint="tcp://x:1",
            public_key=KEY,
            control=str(paths.control),
            started_at=0.0,
        )
        write_struct(paths.head_file, about)
        assert fallow("bugreport", "--output", "a.tar.gz").code == Exit.OK
    assert contents(tmp_path / "a.tar.gz")["head.log"] == "it hangs\n"
    result = fallow("bugreport", "--output", "b.tar.gz")
    assert "head.log: " in result.out.partition("Left out:")[2]


async def test_a_head_tells_of_its_runs(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    monkeypatch.delenv("FALLOW_HEAD__REDIS_URL")
    monkeypatch.setenv("PATH", OWN_PATH)
    async with serving(tmp_path) as head:
        new = await head.create("train")
        await head.create("other")
        result = await asyncio.to_thread(fallow, "bugreport", "train", "--output", "a.tar.gz")
    assert result.code == Exit.OK
    files = contents(tmp_path / "a.tar.gz")
    assert json.loads(files["status.json"])["runs"][0]["name"] == "train"
    assert json.loads(files[f"runs/{new.run}/report.json"])["run"] == new.run
    assert {event["run"] for event in json.loads(files["events.json"])} == {new.run}
