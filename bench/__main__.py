"""Run benchmarks: `python -m bench NAME...` in a checkout, or `make bench ARGS="NAME..."`."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

import fallow
from bench.rows import Row, Settings, progress
from fallow.model import Exit, FallowError

BENCHES: dict[str, tuple[str, str]] = {
    "pause": ("changes:run_pause", "planned changes of the membership"),
    "recovery": ("changes:run_recovery", "SIGKILL of a member"),
    "steady": ("steady:run", "a step compared with DistributedDataParallel's, while the membership does not change"),
    "reproducible": ("steady:run_reproducible", "a step of the reproducible mode compared with the fast mode"),
    "torchrun": ("torchrun:run", "a node joins, compared with torchrun's elastic agent"),
    "head": ("head:run", "a change among 1,000 nodes with 8 workers each under one head; memory of the head"),
    "scale": ("head:run_scale", "processor time of a head in clusters of up to 10,000 nodes"),
    "harvest": ("harvest:run", "use of idle nodes and delay of other jobs, with and without Fallow, on private Slurms"),
}
"""Name -> (module:function of this package, what it measures)."""

ON_DEVICE = frozenset({"pause", "recovery", "steady", "reproducible"})
"""Benchmarks that can train on a device other than the CPU."""

NOT_ALONE = frozenset({"recovery", "torchrun"})
"""Benchmarks that need a second member."""

LARGEST = 1_200_000_000
"""Parameters of the largest model (`workload.make`)."""

INTERRUPTED = 130
"""Exit code of a shell after SIGINT."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print. Returns the exit code."""
    try:
        return measure(parse(words))
    except FallowError as error:
        progress(str(error))
        return error.code


def parse(words: Sequence[str] | None = None) -> Settings:
    """Parse the command line. Ends the process if an argument is not valid."""
    listed = "\n".join(f"  {name:<13} {what}" for name, (_, what) in BENCHES.items())
    parser = argparse.ArgumentParser("bench", description=listed, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=BENCHES, metavar="NAME")
    parser.add_argument("--members", type=numbers, default=[4], metavar="N,...", help="world sizes (4)")
    parser.add_argument("--params", type=millions, default=[10_000_000], metavar="M,...", help="models, millions (10)")
    parser.add_argument("--n", type=int, metavar="N", help="approximate measurements per row")
    parser.add_argument("--device", default="cpu", metavar="KIND", help="device to train on: cpu, cuda (cpu)")
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of harvest, above 60 (300)")
    parser.add_argument("--profile", choices=("plain", "preempt"), default="plain", help="harvest's Slurm (plain)")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    args = parser.parse_args(words)
    least = 1 if NOT_ALONE.isdisjoint(args.names) else 2
    if min(args.members) < least or min(args.params) < 10_000 or max(args.params) > LARGEST:
        parser.error(f"--members: at least {least}; --params: 0.01 to {LARGEST / 1e6:g}")
    if args.n is not None and not 2 <= args.n < 10**6:
        parser.error("--n: at least 2 and below a million")
    if "harvest" in args.names and not 60 < args.seconds <= 80_000:
        parser.error("--seconds: more than 60 and at most 80000")
    if args.device != "cpu" and not ON_DEVICE.issuperset(args.names):
        parser.error(f"--device {args.device}: only {', '.join(sorted(ON_DEVICE))} can use a device")
    return args


def measure(settings: Settings) -> int:
    """Run the benchmarks one after the other. Progress goes to standard error, the figures to standard output.

    Ctrl-C, SIGTERM and a failing benchmark end the measurement. Complete rows are printed, and the exit code tells the
    reason.

    Returns:
        0, `INTERRUPTED`, or the code of the error.

    Raises:
        FallowError: a benchmark failed before the first row.
    """
    rows, code = list[Row](), 0
    # Child processes must import the same checkout as this process, whatever their folder.
    places = [str(Path(module).parents[1]) for module in (__file__, fallow.__file__)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*places, os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if settings.device != "cpu":
            importlib.import_module("bench.workload").check_device(settings.device)
        for name in settings.names:
            module, _, function = BENCHES[name][0].partition(":")
            for row in getattr(importlib.import_module(f"bench.{module}"), function)(settings):
                rows.append(replace(row, device=settings.device))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if not rows:
            raise
        progress(f"stopped after {len(rows)} rows: {error}")
        code = error.code if isinstance(error, FallowError) else Exit.SOFTWARE
    if settings.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n")
    else:
        sys.stdout.writelines(f"{row}\n" for row in rows)
    return code


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def millions(text: str) -> list[int]:
    try:
        return [round(float(word) * 1e6) for word in text.split(",")]
    except OverflowError as error:  # of infinity
        raise ValueError from error


if __name__ == "__main__":
    sys.exit(main())
