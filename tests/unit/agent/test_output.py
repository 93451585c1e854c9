"""Logs of workers on disks that are full or away."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fallow.agent import output
from fallow.agent.output import LogFile


def test_a_log_goes_on_when_its_disk_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One refusal ended it for good: of a training of weeks whose quota had been full for a minute nothing was kept."""
    path = tmp_path / "logs" / "n0.log"
    log = LogFile(path)
    log.write(b"lost\n")
    log.write(b"lost\n")
    path.parent.mkdir()
    log.write(b"kept\n")
    log.close()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"kept\n", 0o600)
    [said] = caplog.messages
    assert "n0.log: cannot be written (No such file or directory)" in said


@pytest.mark.parametrize("error", [None, errno.ENOSPC])
def test_a_log_is_bounded_also_where_closing_a_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """An error of `close`, as NFS tells of a full disk, ended the thread that reads the worker's output."""

    def close(descriptor: int, close: Callable[[int], None] = os.close) -> None:
        close(descriptor)
        if error is not None:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(output, "LOG_LIMIT", 10)
    path = tmp_path / "n0.log"
    log = LogFile(path)
    monkeypatch.setattr(os, "close", close)
    for line in (b"1234567\n", b"abcdefg\n", b"ABCDEFG\n"):
        log.write(line)
    log.close()
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "n0.log": b"ABCDEFG\n",
        "n0.log.1": b"abcdefg\n",
    }
