"""Entry point of `fallow`: finds the command, runs it, and turns errors into one line and an exit code."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click

from fallow import __version__
from fallow.cli.common import print_error
from fallow.model import Exit, FallowError

COMMANDS: dict[str, str] = {
    "submit": "fallow.cli.submit:submit",
    "run": "fallow.cli.run:run",
    "local": "fallow.cli.local:local",
    "check": "fallow.cli.check:check",
    "daemon": "fallow.cli.start:daemon",
    "status": "fallow.cli.show:status",
    "events": "fallow.cli.follow:events",
    "report": "fallow.cli.show:report",
    "logs": "fallow.cli.follow:logs",
    "why": "fallow.cli.follow:why",
    "wait": "fallow.cli.follow:wait",
    "usage": "fallow.cli.usage:usage",
    "top": "fallow.cli.start:top",
    "grow": "fallow.cli.operate:grow",
    "shrink": "fallow.cli.operate:shrink",
    "drain": "fallow.cli.operate:drain",
    "pause": "fallow.cli.operate:pause",
    "resume": "fallow.cli.operate:resume",
    "checkpoint": "fallow.cli.operate:checkpoint",
    "rollback": "fallow.cli.operate:rollback",
    "export": "fallow.cli.export:export",
    "cancel": "fallow.cli.operate:cancel",
    "config": "fallow.cli.config:config",
    "doctor": "fallow.cli.doctor:doctor",
    "bugreport": "fallow.cli.bugreport:bugreport",
    "prune": "fallow.cli.operate:prune",
    "testbed": "fallow.cli.testbed:testbed",
    "demo": "fallow.cli.start:demo",
    "simulate": "fallow.cli.simulate:simulate",
    "service": "fallow.cli.start:service",
    "completion": "fallow.cli.start:completion",
}
"""Command name -> `module:object`. A module is imported when its command is used, so that `fallow` starts fast."""

EXIT_CODES = """\b
Exit codes:
  0   done, or released as planned
  2   wrong usage
  65  bad input: script, schedule, data
  66  a file or name that was given does not exist
  69  head, Slurm or store cannot be reached
  70  a bug in Fallow, or the training failed
  71  the operating system refused something
  73  a second head, or something cannot be created
  74  input or output failed
  75  a deadline passed; try again
  77  not permitted: wrong owner or mode
  78  the configuration is wrong
  93  this allocation is done; do not restart it
  130 interrupted by Ctrl-C (143: by SIGTERM)
submit passes sbatch's exit code on. FALLOW_DEBUG=1 shows tracebacks."""


class LazyGroup(click.Group):
    """A command group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from None


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="fallow %(version)s")
def cli() -> None:
    """Elastic PyTorch training on the nodes a Slurm cluster leaves idle."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # A stream that the caller has closed (`>&-`) is None in Python, and every use of None would fail.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 (until the end)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end)
        # Escape characters that the terminal's character set lacks, instead of failing.
        getattr(sys, name).reconfigure(errors="backslashreplace")
    code = invoke(words)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        code = _print_error(as_fallow_error(error), as_json=False) or code
    sys.exit(code)


def invoke(words: Sequence[str]) -> int:
    """Run one command, print its error if it fails, and return the exit code."""
    try:
        result = cli.main(args=list(words), prog_name="fallow", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return Exit.OK  # click has printed a completion
        # Otherwise click has turned a broken pipe into SystemExit.
        _discard_output()
        return Exit.IOERR
    except Exception as error:
        if os.environ.get("FALLOW_DEBUG") == "1" and not isinstance(error, click.ClickException):
            raise
        # An OSError without a file name comes from standard output, which takes no JSON value either.
        is_named = isinstance(error, FileNotFoundError) or getattr(error, "filename", None) is not None
        is_output_error = isinstance(error, OSError) and not is_named
        if is_output_error:
            _discard_output()
        return _print_error(as_fallow_error(error), wants_json(words) and not is_output_error)
    return result if isinstance(result, int) else Exit.OK


def wants_json(words: Sequence[str]) -> bool:
    """True if --json is an option of Fallow and not of the user's script."""
    if words and words[0] in ("submit", "run"):
        return False
    return "--json" in words[: words.index("--") if "--" in words else len(words)]


def as_fallow_error(error: Exception) -> FallowError:
    """Translate an exception into a message for people and an exit code."""
    match error:
        case FallowError():
            return error
        case click.UsageError():
            hint = f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
            return FallowError(" ".join(error.format_message().split()) + hint, Exit.USAGE)
        case click.ClickException():
            return FallowError(error.format_message(), Exit.NOINPUT)
        case FileNotFoundError(filename=None):  # raised by `os.getcwd`
            return FallowError("the current folder has been removed; cd to one that exists", Exit.NOINPUT)
        case OSError(filename=None):
            return FallowError(f"input or output failed: {error.strerror or error}", Exit.IOERR)
        case OSError():
            # An error that no command handles, for example a removed folder.
            return FallowError(f"{error.filename}: {error.strerror or error}", Exit.OSERR)
    bug = f"a bug in Fallow ({type(error).__name__}: {error}); run it again with FALLOW_DEBUG=1 and report it"
    return FallowError(bug, Exit.SOFTWARE)


def _print_error(error: FallowError, as_json: bool) -> int:
    """Print an error and return its exit code."""
    try:
        print_error(error, as_json)
    except OSError:
        # Standard output takes no JSON value. Standard error may still work, and the exit code stays.
        _discard_output()
        print_error(error, as_json=False)
    return error.code


def _discard_output() -> None:
    """Send further output to /dev/null, since its reader has left. Otherwise Python would fail at exit, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
