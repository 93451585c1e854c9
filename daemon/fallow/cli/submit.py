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
  grow onto idle nodes, up to MAX nodes. All other options go to sbatch
  unchanged. Output and exit code are those of sbatch.

  --nodes=MIN:MAX   limits of the run; a plain --nodes=N means N:N
  --dry-run         submit nothing; print the sbatch commands and scripts, the
                    start of the base job, the idle nodes and the requests for
                    them (from the head's last poll); --json prints one JSON
                    value; if Slurm would refuse the base job, the exit code
                    is that of sbatch
  --fallow=K=V      same as a line `#FALLOW K=V` in the script: nodes=MIN:MAX,
                    workers-per-node=N, partitions=A,B, budget-node-hours=H,
                    weight=X, deadline=YYYY-MM-DD[THH:MM] or =friday[-HH:MM],
                    seed=N, min-minutes=N, harvest-account=NAME; or
                    outlive-base: scancel of the base job does not end the run
  --parsable        print the job id (and ;CLUSTER) only
"""


class SbatchCommand(click.Command):
    """A command whose arguments belong to sbatch: click must not parse them, not even `--`."""

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
        _replace_process(["sbatch", *argv])
    if "json" in option_names and "dry-run" not in option_names:
        raise FallowError("--json needs --dry-run here: fallow submit --dry-run --json SCRIPT", Exit.USAGE)
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
    """Plan a submission. Returns the plan and the script's file (None: --wrap or standard input)."""
    commands, folders = line.values_of("wrap"), line.values_of("chdir")
    source: Path | None = None
    if commands:
        if line.script is not None:
            raise FallowError(f"--wrap makes the script; leave {line.script!r} or --wrap out", Exit.USAGE)
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
    """Find the script's file as sbatch does: in the current folder, in --chdir, and on PATH for a plain name."""
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
    """Decode a script. Its line ends stay as they are, since sbatch reads the file, too, and refuses DOS line ends."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"{name}: is not UTF-8 text ({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
        raise FallowError(text, Exit.DATA) from error


def submit_plan(submission: Submission, source: Path | None) -> int:
    """Create the run at the head, call sbatch and report the outcome to the head. Returns the exit code."""
    from fallow.cli.sbatch_call import call_sbatch, look_up

    state = str(Paths.default().state)
    script = [str(source), *submission.spec.args] if source is not None else []
    if submission.has_option("test-only"):
        variables = job_environment(state, "test", "test", AllocationKind.BASE)
        _replace_process(["sbatch", *submission.options("test", variables), *script], variables)
    if shutil.which("sbatch") is None:
        raise _no_sbatch("not on PATH")
    try:
        new_run = ask("create_run", NewRun, spec=submission.spec)
    except FallowError as error:
        if error.code is not Exit.TEMPFAIL:
            raise
        text = "Nothing was submitted to Slurm; submit it again once `fallow status` answers"
        raise FallowError(f"{error.message}. {text}", error.code) from error
    variables = job_environment(state, new_run.run, new_run.token, AllocationKind.BASE)

    def announce_job(line: str) -> None:
        _report_job(new_run, line.partition(";")[0])
        _announce(submission, line, new_run.run)
        _warn_of_refusal(new_run.run)

    outcome = call_sbatch(
        ["sbatch", "--parsable", *submission.options(new_run.token, variables), *script],
        {name: value for name, value in os.environ.items() if not name.startswith(HEAD_SETTINGS)} | variables,
        announce_job,
        submission.spec.script if source is None and not submission.has_option("wrap") else None,
    )
    if outcome.job is not None:
        return outcome.code
    if outcome.is_refused:
        _report_failure(new_run, outcome.reason, unknown=False)
        return outcome.code or Exit.SOFTWARE
    job = look_up(new_run.token)
    if job is not None:
        say(f"sbatch failed ({outcome.reason}), but Slurm has the job")
        announce_job(job)
        return Exit.OK
    _report_failure(new_run, outcome.reason, unknown=True)
    raise FallowError(
        f"it is not known whether Slurm has the job ({outcome.reason}); do not submit it again yet. Once Slurm "
        f"answers, the head looks for the job. If the job exists, run {new_run.run} continues. If not, the run fails, "
        f"and you can submit again. See: fallow status {new_run.run}; to give up: fallow cancel {new_run.run}",
        Exit.TEMPFAIL,
    )


def _announce(submission: Submission, line: str, run: str) -> None:
    job, _, cluster = line.partition(";")
    if submission.has_option("parsable"):
        click.echo(line)
    elif not submission.has_option("quiet"):
        click.echo(f"Submitted batch job {job}" + (f" on cluster {cluster}" if cluster else ""))
        say(f"run {run}; see: fallow status {run}")
    sys.stdout.flush()


def _report_job(new_run: NewRun, job_id: str) -> None:
    """Report the job id to the head. If the head cannot be reached, leave the job id for it in a file."""
    try:
        ask("base_submitted", run=new_run.run, token=new_run.token, job_id=job_id)
    except FallowError as error:
        say(f"job {job_id} is submitted; the head cannot be told ({error.message}) and will find the job later")
        with contextlib.suppress(OSError):
            # The head can also find the job by the token in its comment, unless the site overwrites comments.
            write_struct(Paths.default().run(new_run.run).base_job(new_run.token), BaseJob(job_id))


def _warn_of_refusal(run: str) -> None:
    """Warn at once if Slurm would refuse the run's harvest jobs. Else that would show only once nodes are idle."""
    with contextlib.suppress(FallowError):
        if refusal := ask("test_harvest", str, run=run):
            say(f"run {run} cannot grow: Slurm would refuse its harvest jobs: {refusal}")


def _report_failure(new_run: NewRun, reason: str, unknown: bool) -> None:
    try:
        ask("base_failed", run=new_run.run, token=new_run.token, reason=reason, unknown=unknown)
    except FallowError as error:
        say(f"the head cannot be told ({error.message}); if `fallow status` shows the run: fallow cancel {new_run.run}")


def _replace_process(argv: list[str], variables: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by sbatch."""
    try:
        os.execvpe(argv[0], argv, {**os.environ, **(variables or {})})  # noqa: S606
    except OSError as error:
        raise _no_sbatch(error.strerror) from error


def _no_sbatch(reason: str | None) -> FallowError:
    text = f"sbatch cannot be started ({reason}); install Slurm's client commands or set PATH"
    return FallowError(text, Exit.UNAVAILABLE)
