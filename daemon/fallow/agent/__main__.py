"""`python -m fallow.agent --key-file PATH [--patience SECONDS] -- CMD ARGS…`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from fallow.agent.agent import PATIENCE_S, Agent
from fallow.agent.place import look_around
from fallow.agent.start import read_key_file, wait_for_head
from fallow.model import FallowError


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
        keys = read_key_file(options.key_file)
        head = wait_for_head(Path(keys.head_file))
        place = look_around(keys, head)
        agent = Agent(keys, head, place, options.command, patience_s=options.patience)
        return asyncio.run(agent.run())
    except FallowError as error:
        print(f"fallow agent: {error.message}", file=sys.stderr)  # noqa: T201
        return error.code


if __name__ == "__main__":
    sys.exit(main())
