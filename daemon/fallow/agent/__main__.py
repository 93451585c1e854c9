"""`python -m fallow.agent --key-file PATH [--patience SECONDS] -- CMD ARGS…`."""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import TypeVar

from fallow.agent.agent import PATIENCE_S, Agent
from fallow.agent.launch import look_around
from fallow.files import read_struct
from fallow.model import Exit, FallowError, HeadFile, KeyFile

T = TypeVar("T")

FILE_S = 10.0
"A shared file system may show a new file late."
_LOOK_S = 0.1
_NO_KEYS = "was this job submitted by Fallow, and is its state folder mounted here?"


def main(argv: list[str] | None = None) -> int:
    """Run one agent to its end and return its exit code."""
    parser = argparse.ArgumentParser(prog="fallow.agent", description="Node agent; started by `fallow run`.")
    parser.add_argument("--key-file", type=Path, required=True, help="the allocation's KeyFile")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="end when idle and the head is silent for so long",
    )
    parser.add_argument("command", nargs="+", metavar="CMD", help="what each worker runs")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="fallow agent: %(message)s")
    try:
        keys = read_soon(options.key_file, KeyFile, _NO_KEYS)
        head = read_soon(Path(keys.head_file), HeadFile, "start a head with `fallow daemon`")
        launch = look_around(keys, head, options.command)

        async def serve() -> int:
            return await Agent(keys, head, launch, options.patience).run()

        return asyncio.run(serve())
    except FallowError as error:
        print(f"fallow agent: {error.message}", file=sys.stderr)  # noqa: T201
        return error.code


def read_soon(path: Path, kind: type[T], advice: str, within_s: float = FILE_S) -> T:
    """Read a struct from a private file; wait for the file at most `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return read_struct(path, kind)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise FallowError(f"{path}: still missing after {within_s:g} s; {advice}", Exit.NOINPUT) from None
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
