"""How much faster runs train on more nodes: published measurements, and what a head has learned.

Work is counted in what one node does in a second, so that the work of different models adds up.

Sources:
    `bftrainer:MODEL`: images per second on Summit nodes with 6 V100 each (Liu et al., BFTrainer, arXiv 2106.12091).
    `adaptdl:MODEL`: steps of 4-GPU nodes as measured for Pollux (Qiao et al., OSDI'21; contrib/traces/README.md), of
        the largest global batch that was measured on three numbers of nodes; `core.gain`
        foretells what is below the fewest nodes measured.
    `head:FILE[:RUN]`: `fallow status --json`, the speeds of its (first) run.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from fallow.core.planning import gain
from fallow.core.planning.gain import Curve
from fallow.model import Exit, FallowError, SpeedView
from fallow.sim.types import RunPlan

Rate = tuple[tuple[int, float], ...]
"""(nodes, work per second), ascending; linear in between, constant beyond."""

DEFAULT = "10x64:bftrainer:ShuffleNet"
"""What BFTrainer was tried with."""

_SIZE = re.compile(r"(\d{1,9})x(?:(\d{1,9})-)?(\d{1,9})(?:,base=(\d{1,9}))?")

_NODES = (1, 2, 4, 8, 16, 32, 64)
BFTRAINER = {
    "AlexNet": (7115.3, 13071.7, 21066.1, 40484.9, 74002.9, 130762.0, 202135.4),
    "ResNet18": (5218.8, 10582.5, 20436.0, 39584.0, 78023.8, 144762.5, 262723.0),
    "MnasNet": (3245.7, 6001.9, 11489.3, 23075.6, 43899.7, 83474.2, 160493.6),
    "MobileNet": (3039.9, 5893.0, 11386.0, 22024.8, 42488.4, 82268.3, 155213.8),
    "ShuffleNet": (2831.0, 5259.0, 9988.0, 20379.2, 38895.3, 74125.1, 145081.5),
    "VGG16": (1193.3, 2389.2, 4691.7, 9257.9, 18348.9, 36208.5, 70151.7),
    "DenseNet": (989.9, 1952.5, 3849.8, 7608.1, 14993.2, 28812.2, 57773.9),
}

SHARDS = 16
"""Shards per node of the largest world: the measured curves have no stairs of whole shards."""

GPUS = 4
"""On each node of the measurements behind `adaptdl`."""

NEAR = 0.1
"""Global batches that differ by at most this part count as the same."""

MOST_RUNS = 10_000
"""Ten times what a head is meant for."""

MEASURED = 600.0
"""Seconds that each published measurement is taken to have lasted: it is believed as it stands."""


def speeds(plan: RunPlan) -> tuple[float, ...]:
    """Work per second on 0, 1, ... `plan.most` idle nodes beside its own; nothing below `min_nodes` in all."""
    in_all = range(plan.base, plan.max_nodes + 1)
    return tuple(0.0 if n < plan.min_nodes else rate_of(plan.rate, n) for n in in_all)


def rate_of(rate: Rate, nodes: int) -> float:
    """Work per second on so many nodes."""
    right = bisect_right(rate, nodes, key=lambda point: point[0])
    if right == len(rate):
        return rate[-1][1]
    n0, r0 = rate[right - 1] if right else (0, 0.0)
    n1, r1 = rate[right]
    return r0 + (r1 - r0) * (nodes - n0) / (n1 - n0)


def plans(text: str, adaptdl: Path | None = None) -> list[RunPlan]:
    """Runs from words: `COUNTxMAX:CURVE` or `COUNTxMIN-MAX,base=K:CURVE`, several with `;` between them.

    Args:
        text: for example `10x64:bftrainer:ShuffleNet;2x2-16,base=4:adaptdl:bert`: two of 2 to 16 nodes, 4 of them
            their own.
        adaptdl: the file behind the curves of that name.

    Raises:
        FallowError: the text makes no sense, or names a curve that does not exist.
    """
    found: list[RunPlan] = []
    for part in text.split(";"):
        size, _, curve = part.strip().partition(":")
        number, least, most, base = _size(size)
        if not (number >= 1 and 1 <= least <= most and base < most and curve):
            raise FallowError(
                f"runs {part.strip()!r}: wanted COUNTxNODES:CURVE, COUNTxMIN-MAX:CURVE, or with a base of fewer than "
                f"MAX nodes COUNTxMIN-MAX,base=NODES:CURVE; for example {DEFAULT}",
                Exit.USAGE,
            )
        if len(found) + number > MOST_RUNS:
            raise FallowError(f"runs {text!r}: more than {MOST_RUNS:,} runs", Exit.USAGE)
        rate = curve_of(curve, adaptdl)
        found += [
            RunPlan(
                run=f"r{len(found) + k + 1}",
                min_nodes=least,
                max_nodes=most,
                rate=rate,
                shards=SHARDS * most,
                base=base,
            )
            for k in range(number)
        ]
    return found


def _size(words: str) -> tuple[int, int, int, int]:
    """Number of runs, least and most nodes of each, and its own ones; zeros: it makes no sense."""
    match = _SIZE.fullmatch(words)
    if match is None:
        return 0, 0, 0, 0
    count, low, high, own = match.groups()
    return int(count), int(low or 1), int(high), int(own or 0)


def curve_of(name: str, adaptdl: Path | None = None) -> Rate:
    """A curve by its name (see above)."""
    source, _, which = name.partition(":")
    if source == "bftrainer" and which in BFTRAINER:
        return _whole(list(zip(_NODES, BFTRAINER[which], strict=True)))
    if source == "adaptdl" and adaptdl is not None:
        return _fitted(which, adaptdl)
    if source == "head" and which:
        return _learned(which)
    raise FallowError(
        f"curve {name!r}: there is bftrainer:MODEL ({', '.join(BFTRAINER)}), adaptdl:MODEL and head:FILE", Exit.USAGE
    )


def _whole(points: Sequence[tuple[int, float]]) -> Rate:
    """In terms of the work of one node; that of the fewest nodes is shared out where one was not measured."""
    nodes, speed = points[0]
    return tuple((n, s * nodes / speed) for n, s in points)


def _fitted(model: str, path: Path) -> Rate:
    steps: dict[int, dict[int, tuple[int, float]]] = {}
    "nodes -> global batch -> (members, seconds per step), of nodes that were fully used"
    models = set()
    with _opened(path) as lines:
        for row in csv.DictReader(lines):
            try:
                nodes, members = int(row["num_nodes"]), int(row["num_replicas"])
                batch, step_s = members * int(row["local_bsz"]), float(row["step_time_s"])
            except (KeyError, TypeError, ValueError):
                raise FallowError(f"{path}: not the columns of adaptdl_scaling.csv", Exit.DATA) from None
            models.add(row["model"])
            if row["model"] == model and members == GPUS * nodes:
                steps.setdefault(nodes, {})[batch] = members, step_s
    if model not in models:
        raise FallowError(f"curve adaptdl:{model}: {path} has {', '.join(sorted(models))}", Exit.USAGE)
    best: list[tuple[int, float]] = []
    for batch in sorted({batch for each in steps.values() for batch in each}):
        near = [
            min(((abs(b - batch), m, s) for b, (m, s) in each.items() if abs(b - batch) <= NEAR * batch), default=None)
            for _, each in sorted(steps.items())
        ]
        some = [(m, s) for _, m, s in filter(None, near)]
        if len(some) >= min(3, len(steps)):
            best = some
    if not best:
        raise FallowError(f"{path}: no global batch of {model} was measured on three numbers of nodes", Exit.DATA)
    curve = Curve()
    for members, step_s in best:
        curve.observe(members, step_s, MEASURED, 0.0)
    most = max(steps)
    return _whole(gain.speeds(curve, SHARDS * GPUS * most, GPUS, most))


class _Run(msgspec.Struct):
    run: str
    speeds: list[SpeedView] = []


class _Status(msgspec.Struct):
    runs: list[_Run]


def _learned(where: str) -> Rate:
    name, _, run = where.partition(":")
    with _opened(Path(name)) as text:
        try:
            status = msgspec.json.decode(text.read(), type=_Status)
        except msgspec.MsgspecError as error:
            raise FallowError(f"{name}: not what `fallow status --json` prints ({error})", Exit.DATA) from None
    for each in status.runs:
        if each.speeds and run in ("", each.run):
            return _whole([(speed.nodes, speed.steps_per_s) for speed in each.speeds])
    raise FallowError(f"{name}: no speeds of {f'run {run}' if run else 'any run'} in it", Exit.DATA)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            yield lines
    except OSError as error:
        raise FallowError(f"{path}: cannot be read ({error.strerror})", Exit.NOINPUT) from None
