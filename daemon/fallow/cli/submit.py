"""`fallow submit`: sbatch, elastic."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from fallow.cli.common import ask, print_error, say, tell
from fallow.config import load_config
from fallow.control.protocol import BaseJob, NewRun
from fallow.core.submission.prepare import Submission, plan
from fallow.core.submission.sbatch import HEAD_SETTINGS, job_environment
from fallow.core.submission.sbatch_line import CommandLine, split
from fallow.core.submission.sbatch_table import INFORMATIVE
from fallow.core.submission.script import parse_script, wrap
from fallow.files import Paths, write_struct
from fallow.model import AllocationKind, Exit, FallowError

_HELP = """\
Usage: fallow submit [--nodes=MIN:MAX] [--dry-run] [--fallow=KEY=VALUE ...] [sbatch options] SCRIPT [ARGS]

  sbatch, elastic: submits SCRIPT as a base job of MIN nodes and lets the run
  grow onto idle nodes, up to MAX. Everything else goes to sbatch as it is;
  sbatch's output and exit code come back.

  --nodes=MIN:MAX   limits of the run; a plain --nodes=N means N:N
  --dry-run         submit nothing; print the sbatch commands and scripts, when
                    the base job would start, what is idle and would be asked
                    for (from the head's last poll); --json prints it as one
                    JSON value; the exit code is sbatch's where Slurm would
                    refuse the base job
  --fallow=K=V      what a line `#FALLOW K=V` in the script says: nodes=MIN:MAX,
                    workers-per-node=N, partitions=A,B, budget-node-hours=H,
                    weight=X, deadline=YYYY-MM-DD[THH:MM] or =friday[-HH:MM],
                    seed=N, min-minutes=N, harvest-account=NAME; or
                    outlive-base: scancel of the base job does not end the run
  --parsable        print the job id (and ;CLUSTER) only
"""


class SbatchCommand(click.Command):
    """Its arguments are sbatch's: click must not look at them, not even at `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["argv"] = tuple(args)
        return []

    def get_help(self, ctx: click.Context) -> str:
        return _HELP.rstrip("\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


@click.command(cls=SbatchCommand, short_help="sbatch, elastic.")
def submit(argv: tuple[str, ...]) -> int:
    """sbatch, elastic."""
    line = split(argv)
    option_names = {option.name for part in line.components for option in part}
    if option_names & {"help", "usage"}:
        click.echo(_HELP, nl=False)
        return Exit.OK
    if option_names & INFORMATIVE:
        _become(["sbatch", *argv])
    if "json" in option_names and "dry-run" not in option_names:
        raise FallowError("--json shows what --dry-run finds; give both", Exit.USAGE)
    if "dry-run" in option_names:
        return _dry_run(line, "json" in option_names)
    submission, source = prepare(line)
    for warning in submission.warnings:
        say(warning)
    return submit_plan(submission, source)


def _dry_run(line: CommandLine, as_json: bool) -> int:
    from fallow.cli.dry_run import SBATCH_REFUSED, dry_run, show

    try:
        submission, source = prepare(line)
        result = dry_run(submission, source)
    except FallowError as error:
        print_error(error, as_json)
        return error.code
    for warning in submission.warnings:
        say(warning)
    tell(result, as_json, lambda _: click.echo(show(result), nl=False))
    return SBATCH_REFUSED if result.start is not None and result.start.refused else Exit.OK


def prepare(line: CommandLine) -> tuple[Submission, Path | None]:
    """The submission, thought through, and the script's file (None: --wrap or standard input)."""
    commands, folders = line.given("wrap"), line.given("chdir")
    source: Path | None = None
    if commands:
        if line.script is not None:
            raise FallowError(f"--wrap makes the script; {line.script!r} cannot be given, too", Exit.USAGE)
        name, text = "wrap", wrap(commands[-1])
    elif line.script is not None:
        source = find_script(line.script, folders[-1] if folders else None)
        name, text = source.name, read_script(source)
    elif sys.stdin.isatty():
        raise FallowError("no batch script was given; usage: fallow submit [options] SCRIPT [ARGS]", Exit.USAGE)
    else:
        name, text = "stdin", decode_script(sys.stdin.buffer.read(), "stdin")
    umask = os.umask(0o077)
    os.umask(umask)
    submission = plan(
        line,
        parse_script(text, name),
        environ=os.environ,
        cwd=os.getcwd(),
        umask=umask,
        now=time.time(),
        min_minutes=load_config().harvest.min_minutes,
    )
    return submission, source


def find_script(name: str, chdir: str | None) -> Path:
    """The script's file, looked for where sbatch looks: here, in --chdir, then on PATH for a plain name."""
    places = [Path(name)]
    if not os.path.isabs(name):
        places.extend([Path(chdir, name)] if chdir else [])
        on_path = shutil.which(name, mode=os.R_OK) if "/" not in name else None
        places.extend([Path(on_path)] if on_path else [])
    for place in places:
        if place.is_dir():
            raise FallowError(f"{place}: is a folder, not a batch script", Exit.NOINPUT)
        if place.is_file():
            return place.absolute()
        if place.exists():
            raise FallowError(f"{place}: is no regular file; give a batch script", Exit.NOINPUT)
    raise FallowError(f"{name}: no such batch script here", Exit.NOINPUT)


def read_script(path: Path) -> str:
    try:
        return decode_script(path.read_bytes(), str(path))
    except OSError as error:
        raise FallowError(f"{path}: cannot be read ({error.strerror})", Exit.NOINPUT) from error


def decode_script(data: bytes, name: str) -> str:
    """The text with its line ends as they are: sbatch reads the same bytes, and refuses those of DOS."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"{name}: is not UTF-8 text ({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
        raise FallowError(text, Exit.DATA) from error


def submit_plan(submission: Submission, source: Path | None) -> int:
    """Makes the run at the head, calls sbatch, and tells the head what came of it."""
    from fallow.cli.sbatch_call import call_sbatch, look_up

    state = str(Paths.default().state)
    script = [str(source), *submission.spec.args] if source is not None else []
    if submission.asked("test-only"):
        variables = job_environment(state, "test", "test", AllocationKind.BASE)
        _become(["sbatch", *submission.options("test", variables), *script], variables)
    if shutil.which("sbatch") is None:
        raise _no_sbatch("not on PATH")
    try:
        new = ask("create_run", NewRun, spec=submission.spec)
    except FallowError as error:
        if error.code is not Exit.TEMPFAIL:
            raise
        text = "Nothing was submitted to Slurm; submit it again once `fallow status` answers"
        raise FallowError(f"{error.message}. {text}", error.code) from error
    variables = job_environment(state, new.run, new.token, AllocationKind.BASE)

    def announce_job(line: str) -> None:
        _report_job(new, line.partition(";")[0])
        _announce(submission, line, new.run)
        _warn_of_refusal(new.run)

    outcome = call_sbatch(
        ["sbatch", "--parsable", *submission.options(new.token, variables), *script],
        {name: value for name, value in os.environ.items() if not name.startswith(HEAD_SETTINGS)} | variables,
        announce_job,
        submission.spec.script if source is None and not submission.asked("wrap") else None,
    )
    if outcome.job is not None:
        return outcome.code
    if outcome.is_refused:
        _report_failure(new, outcome.reason, unknown=False)
        return outcome.code or Exit.SOFTWARE
    job = look_up(new.token)
    if job is not None:
        say(f"sbatch failed ({outcome.reason}), but Slurm has the job")
        announce_job(job)
        return Exit.OK
    _report_failure(new, outcome.reason, unknown=True)
    raise FallowError(
        f"nobody knows whether Slurm has the job ({outcome.reason}); do not submit it again yet. Once Slurm answers, "
        f"the head looks for it: if it is there, run {new.run} takes it up, else the run fails, and you can submit it "
        f"again. See: fallow status {new.run}; to give it up: fallow cancel {new.run}",
        Exit.TEMPFAIL,
    )


def _announce(submission: Submission, line: str, run: str) -> None:
    job, _, cluster = line.partition(";")
    if submission.asked("parsable"):
        click.echo(line)
    elif not submission.asked("quiet"):
        click.echo(f"Submitted batch job {job}" + (f" on cluster {cluster}" if cluster else ""))
        say(f"run {run}; see: fallow status {run}")
    sys.stdout.flush()


def _report_job(new: NewRun, job_id: str) -> None:
    """The head learns the job id; if it is away just now, it is left for it."""
    try:
        ask("base_submitted", run=new.run, token=new.token, job_id=job_id)
    except FallowError as error:
        say(f"job {job_id} is submitted, but the head was not told ({error.message}); it will find it by itself")
        with contextlib.suppress(OSError):
            # Where no site overwrites comments, it finds the job by the token in its comment, too.
            write_struct(Paths.default().run(new.run).base_job(new.token), BaseJob(job_id))


def _warn_of_refusal(run: str) -> None:
    """Say at once if Slurm would take no harvest job of the run, which would show only once nodes are idle."""
    with contextlib.suppress(FallowError):
        if refusal := ask("test_harvest", str, run=run):
            say(f"run {run} cannot grow, Slurm would refuse its harvest jobs: {refusal}")


def _report_failure(new: NewRun, reason: str, unknown: bool) -> None:
    try:
        ask("base_failed", run=new.run, token=new.token, reason=reason, unknown=unknown)
    except FallowError as error:
        say(f"the head was not told ({error.message}); if the run is still shown: fallow cancel {new.run}")


def _become(argv: list[str], variables: Mapping[str, str] | None = None) -> NoReturn:
    """sbatch itself takes over: nothing of ours is left to do."""
    try:
        os.execvpe(argv[0], argv, {**os.environ, **(variables or {})})  # noqa: S606
    except OSError as error:
        raise _no_sbatch(error.strerror) from error


def _no_sbatch(why: str | None) -> FallowError:
    text = f"sbatch cannot be started ({why}); install Slurm's client commands or set PATH"
    return FallowError(text, Exit.UNAVAILABLE)
