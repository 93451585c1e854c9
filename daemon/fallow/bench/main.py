"""Entry of `fallow bench`."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fallow.bench.rows import Row, Settings
from fallow.model import Exit, FallowError

BENCHES: dict[str, str] = {
    "pause": "planned changes of the membership",
    "recovery": "SIGKILL of a member",
    "chaos": "a fault every 10 s for half an hour, and the same training undisturbed",
    "steady": "our step beside DistributedDataParallel's, with an unchanged membership",
    "reproducible": "a step of the reproducible mode, against the fast one",
    "state": "the state's way to a newcomer, against a checkpoint",
    "checkpoint": "training held up by durable checkpoints, against torch.save",
    "shares": "one member slower than the others, against the sum of the speeds",
    "planner": "one plan for a large cluster and many runs",
    "head": "a change among a thousand nodes with eight workers each, under one head, and its memory",
    "torchrun": "absorb, release and kill, against torchrun's elastic agent",
    "torchft": "absorb and kill, against torchft, where it is installed",
}
"""Name (and module) -> what it measures."""

ON_DEVICE = frozenset({"pause", "recovery", "steady", "reproducible", "state", "checkpoint"})
"""Those that can train on another device than the processor."""

ALONE = ON_DEVICE - {"recovery"}
"""Those that mean something for a world of one."""

INTERRUPTED = 130
"""Exit code as shells give it after SIGINT."""


def main(names: Sequence[str], settings: Settings, *, json: bool) -> int:
    """Measure one after the other; progress goes to standard error, the figures to standard output.

    Ctrl-C or SIGTERM ends it with the rows that are complete, and so does a benchmark that fails; the code says which.

    Args:
        names: of `BENCHES`; empty: all of them.
        settings: worlds and models.
        json: print one JSON list instead of a table.

    Raises:
        FallowError: nothing could be measured.
    """
    from rich.console import Console

    console = Console(stderr=True)
    found: list[Row] = []
    code: int = Exit.OK
    problem: Exception | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = list(names) or list(BENCHES)
    with console.status("bench") as status, contextlib.suppress(KeyboardInterrupt):
        code = INTERRUPTED
        try:
            for number, name in enumerate(wanted, start=1):
                head = f"[{number}/{len(wanted)}] "

                def progress(text: str, head: str = head) -> None:
                    status.update(head + text)
                    if not console.is_terminal:
                        sys.stderr.write(f"bench: {head}{text}\n")

                for row in importlib.import_module(f"fallow.bench.{name}").run(settings, progress):
                    found.append(replace(row, device=settings.device))  # noqa: PERF401 - complete rows outlive an end
            code = Exit.OK
        except Exception as error:
            problem = error
    if problem is not None and not found:
        raise problem
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        show(found)
    if problem is not None:
        sys.stderr.write(f"bench: the rows are of what was finished; then: {problem}\n")
        code = problem.code if isinstance(problem, FallowError) else Exit.SOFTWARE
    return code


def show(found: Sequence[Row]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "members", "params", "p50", "p95", "n", "peer", "ratio", box=None, pad_edge=False)
    for row in found:
        table.add_row(
            row.name,
            "-" if row.members is None else str(row.members),
            "-" if row.params is None else f"{row.params / 1e6:g} M",
            f"{row.ours.p50:.3f} {row.unit}",
            f"{row.ours.p95:.3f} {row.unit}",
            str(row.ours.n),
            "-" if row.peer is None else f"{row.peer.name} {row.peer.p50:.3f} {row.unit}",
            "-" if row.ratio is None else f"{row.ratio:.3g}",
        )
    console = Console()
    console.print(table)
    for row in found:
        if row.note:
            console.print(f"{row.name}, {row.members or '-'} members: {row.note}", style="dim", soft_wrap=True)


def check_names(names: Sequence[str], device: str = "cpu") -> None:
    """Refuse what cannot be measured before anything is started.

    Raises:
        FallowError: a name that is not in `BENCHES`, one that measures on the processor only, or no such device here.
    """
    for name in names:
        if name not in BENCHES:
            raise FallowError(f"bench {name!r}: unknown; there are {', '.join(BENCHES)}, harvest", Exit.USAGE)
    if device == "cpu":
        return
    if not names or not ON_DEVICE.issuperset(names):
        raise FallowError(
            f"bench --device {device}: name some of {', '.join(sorted(ON_DEVICE))}; others measure on the processor",
            Exit.USAGE,
        )
    importlib.import_module("fallow.bench.device").check(device)  # like what measures, it needs torch
