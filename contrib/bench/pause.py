"""How long does training stand still when the membership changes as planned?

Real head, store, agents and workers on this machine, over gloo. A GPT of about --params million parameters trains with
--members members while a schedule absorbs and releases one worker in turn; the youngest and the oldest leave
alternately, so that rank 0 changes hands, too. A pause is from the end of the last step in the old generation to the
start of the first in the new one, on the member that waited longest.

usage: pause.py [--members 4] [--params 10] [--changes 32] [--json] [--keep FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fallow.core.schedule import Item, parse_schedule
from fallow.local.driver import Driver
from fallow.model import ChangeKind, FallowError, GenerationReport, RunReport, RunStatus

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt_stdlib.py"
LAYERS = 6
CONTEXT = 16
PARTS = ("drain", "group", "state", "data")
FIRST_STEP = 6
SPACING = 3
"""Steps between two changes. A change that comes late delays those after it."""


def main() -> int:
    """Measure, and print a table or one JSON list; returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, default=4, help="around which the membership moves")
    parser.add_argument("--params", type=float, default=10.0, help="millions")
    parser.add_argument("--changes", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="one JSON value on standard output")
    parser.add_argument("--keep", type=Path, help="write the disturbed run's whole report to this file")
    options = parser.parse_args()
    if options.members < 2 or options.changes < 2 or options.params <= 0:
        parser.error("at least 2 members, 2 changes and some parameters")
    members, width = options.members, width_for(options.params * 1e6)
    steps = FIRST_STEP + 6 * options.changes + 10
    command = [sys.executable, str(EXAMPLE), "--layers", str(LAYERS), "--width", str(width)]
    command += ["--context", str(CONTEXT), "--batch-size", "1", "--global-batch", str(members + 1)]
    command += ["--steps", str(steps)]
    try:
        disturbed, missed = train(command, members, schedule(members, options.changes), members + 1)
        calm, _ = train(command, 1, (), members + 1)
    except FallowError as error:
        sys.stderr.write(f"pause: {error.message}\n")
        return int(error.code)
    if options.keep is not None:
        options.keep.write_bytes(msgspec.json.format(msgspec.json.encode(disturbed), indent=2))
    rows = figures(disturbed, calm, members, parameters(width))
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        show(rows)
    good = disturbed.status is RunStatus.FINISHED and not disturbed.samples.lost and not disturbed.samples.duplicated
    if missed:
        sys.stderr.write(f"pause: {missed} changes did not happen before the training ended\n")
    return 0 if good and not missed else 70


def schedule(members: int, changes: int) -> tuple[Item, ...]:
    """One comes, one goes: the youngest and the oldest in turn."""
    words = []
    there = list(range(members))
    born = members
    for number in range(changes):
        step = FIRST_STEP + SPACING * number
        if number % 2 == 0:
            there.append(born)
            born += 1
            words.append(f"+1@{step}")
        elif number % 4 == 1:
            there.pop()
            words.append(f"-1@{step}")
        else:
            words.append(f"-m{there.pop(0)}@{step}")
    return parse_schedule(",".join(words), members)


def train(command: Sequence[str], members: int, items: Sequence[Item], most: int) -> tuple[RunReport, int]:
    """One run with its output on standard error; its report, and how many items did not happen."""
    folder = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    try:
        driver = Driver(folder, command, members, items, max_members=most, output=sys.stderr.fileno())
        return asyncio.run(driver.train()), len(driver.missed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def width_for(wanted: float) -> int:
    """Width of the model (a multiple of 16) whose number of parameters comes nearest."""
    return min(range(16, 4096, 16), key=lambda width: abs(parameters(width) - wanted))


def parameters(width: int) -> int:
    """Of the example's GPT: blocks, final norm, byte and place embeddings, and the head."""
    block = 12 * width * width + 13 * width
    return LAYERS * block + 2 * width + 256 * width + CONTEXT * width + 256 * width + 256


def figures(disturbed: RunReport, calm: RunReport, members: int, params: int) -> list[dict[str, Any]]:
    """Rows of the benchmark's JSON: all planned changes, then joins and leaves by themselves."""
    changes = [g for g in disturbed.generations if g.kind is not ChangeKind.START and g.pause_s is not None]
    wanted: dict[str, set[ChangeKind]] = {
        "planned pause": set(ChangeKind),
        "planned pause, absorb": {ChangeKind.ABSORB},
        "planned pause, release": {ChangeKind.RELEASE},
    }
    rows = []
    for name, kinds in wanted.items():
        some = [change for change in changes if change.kind in kinds]
        if some:
            rows.append(row(name, some, members, params))
    loss = math.nan if disturbed.final_loss is None or calm.final_loss is None else disturbed.final_loss
    apart = abs(loss - (calm.final_loss or 0.0))
    rows[0]["note"] += (
        f"\nsamples: {disturbed.samples.consumed} used, {disturbed.samples.lost} lost, "
        f"{disturbed.samples.duplicated} duplicated in {disturbed.steps} steps; steps discarded: "
        f"{disturbed.steps_discarded}\nfinal loss {loss:.6f}, undisturbed {calm.final_loss:.6f}, apart {apart:.2g}"
    )
    return rows


def row(name: str, changes: Sequence[GenerationReport], members: int, params: int) -> dict[str, Any]:
    """One row, with the parts of the pause in its note."""
    pauses = [change.pause_s or 0.0 for change in changes]
    lines = [f"max {max(pauses):.3f} s"]
    for part in PARTS:
        values = [getattr(change.parts, part) for change in changes]
        lines.append(f"{part}: p50 {quantile(values, 0.5):.4f} s, p95 {quantile(values, 0.95):.4f} s")
    return {
        "name": name,
        "members": members,
        "params": params,
        "unit": "s",
        "ours": {"p50": quantile(pauses, 0.5), "p95": quantile(pauses, 0.95), "n": len(pauses)},
        "peer": None,
        "ratio": None,
        "note": "\n".join(lines),
    }


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank: the smallest value that at least the share `q` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table for people."""
    print(f"{'what':<24}{'members':>8}{'params':>10}{'p50':>9}{'p95':>9}{'n':>5}")
    for one in rows:
        ours = one["ours"]
        print(
            f"{one['name']:<24}{one['members']:>8}{one['params'] / 1e6:>8.1f} M"
            f"{ours['p50']:>7.3f} s{ours['p95']:>7.3f} s{ours['n']:>5}"
        )
        print("\n".join(f"    {line}" for line in one["note"].splitlines()))


if __name__ == "__main__":
    sys.exit(main())
