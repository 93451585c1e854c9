#!/usr/bin/env python3
"""Runs the device tests and the benchmarks on this machine's GPUs, in less than ten minutes, and writes one JSON file.

    python contrib/bench/gpu.py --out gpu.json            # what `make bench-gpu` does
    python contrib/bench/gpu.py --device fake             # tries the script itself on the tests' stand-in

What needs more GPUs than there are is listed with what it needs. Figures of the stand-in mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 530.0
"""For everything together."""

TESTS_S = 330.0
"""Of it for the tests, at most."""

_END_S = 20.0

_NOTHING = "made on the tests' stand-in for a GPU: no figure here means anything"


@dataclass(frozen=True)
class Bench:
    """A benchmark, and how many GPUs it needs for its sums to stay on them."""

    command: str
    gpus: int = 1
    smaller: str = ""
    "why its model is smaller than wanted"


STEADY = "-m fallow.bench.steady --members {members} --params {params} --rounds 16 --trainings 2"
CHANGES = "-m fallow bench --json --members {members} --params {params} --n {n}"

LARGE = 1000
"""Millions of parameters of the model whose state goes from one worker to another."""

_BYTES = 25
"""Of a GPU's memory for each of its parameters and each worker: weights 2, optimizer 12, sums 2; the rest is margin."""


def large(free_gib: float) -> Bench:
    """One worker absorbs another and is released: with `LARGE`, or what fits into one GPU for both of them.

    Args:
        free_gib: memory of a GPU, in GiB, that nobody uses.
    """
    needed_gib = 2 * _BYTES * LARGE * 1e6 / 2**30
    millions = min(LARGE, max(25, int(LARGE * free_gib / needed_gib) // 25 * 25))
    smaller = f"{LARGE} M parameters need {needed_gib:.0f} GiB of free memory on the GPU, and {free_gib:g} GiB are free"
    return Bench(CHANGES.format(members=1, params=millions, n=2) + " pause", smaller=smaller * (millions < LARGE))


def on_gpus(free_gib: float) -> list[Bench]:
    """What matters most comes first: time may be up before the last one."""
    return [
        Bench(STEADY.format(members=1, params=100_000_000)),
        large(free_gib),
        Bench(f"{CHANGES.format(members=1, params=100, n=4)} state"),
        Bench(f"{CHANGES.format(members=1, params=25, n=8)} pause"),
        Bench(f"{CHANGES.format(members=2, params=25, n=4)} recovery"),
        Bench(f"{STEADY.format(members=1, params=100_000_000)} --reproducible"),
        Bench(f"{STEADY.format(members=1, params=100_000_000)} --shards 4"),
        Bench(f"{STEADY.format(members=1, params=100_000_000)} --compile"),
        Bench(STEADY.format(members=2, params=100_000_000), gpus=2),
        Bench(f"{STEADY.format(members=2, params=100_000_000)} --reproducible", gpus=2),
        Bench(f"{CHANGES.format(members=2, params=100, n=4)} pause", gpus=4),
        Bench(f"{CHANGES.format(members=2, params=100, n=2)} recovery", gpus=4),
    ]


ON_FAKE = [
    Bench("-m fallow.bench.steady --members 1 --params 100000 --rounds 4 --trainings 2"),
    Bench("-m fallow bench --json --members 1 --params 1 --n 2 pause", smaller=f"{LARGE} M parameters are for a GPU"),
    Bench("-m fallow bench --json --members 1 --params 0.1 --n 4 state"),
    Bench("-m fallow bench --json --members 1 --params 0.1 --n 4 pause"),
    Bench("-m fallow bench --json --members 2 --params 0.1 --n 2 recovery"),
    Bench("-m fallow.bench.steady --members 1 --params 100000 --rounds 4 --trainings 2 --reproducible"),
    Bench("-m fallow.bench.steady --members 2 --params 100000 --rounds 4 --trainings 2", gpus=2),
]

FACTS = """import json, sys, torch
kind = sys.argv[1]
if not torch.accelerator.is_available():
    sys.exit(f"gpu: torch {torch.__version__} finds no GPU; nvidia-smi and torch's build say why")
facts = {"kind": kind, "name": kind, "count": torch.accelerator.device_count(), "torch": torch.__version__}
facts["cuda"], facts["nccl"] = torch.version.cuda, None
if kind == "cuda":
    facts["name"] = torch.cuda.get_device_name()
    free, total = torch.cuda.mem_get_info()
    facts["memory_gib"], facts["free_gib"] = round(total / 2**30, 1), round(free / 2**30, 1)
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(facts))
"""


class Session:
    """Runs commands until the time is up.

    Args:
        device: `cuda`, or `fake`.
        environ: for what is measured.
    """

    def __init__(self, device: str, environ: dict[str, str]) -> None:
        self._device, self._environ = device, environ
        self._tests = {**os.environ, "FALLOW_TEST_DEVICE": device, "FALLOW_REQUIRE_ACCELERATOR": "1"}
        self._end = time.monotonic() + LIMIT_S

    def run(self, words: str, environ: dict[str, str], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Run Python with these arguments. Returns the command, its seconds, code, output and errors."""
        shown = f"python {words}"
        left_s = min(limit_s, self._end - time.monotonic())
        if left_s < 1.0:
            return {"command": shown, "failed": f"not begun: {LIMIT_S:g} s were over"}
        print(f"gpu: {shown.splitlines()[0]}", file=sys.stderr, flush=True)
        began = time.monotonic()
        command = [sys.executable, *shlex.split(words)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            cut_off = ""
            try:
                output, _ = process.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                output, cut_off = end(process), f"cut off: its {left_s:.0f} s were over"
            except BaseException:
                end(process)
                raise
            errors.seek(0)
            said = errors.read()
        sys.stderr.write(said)
        found = {"command": shown, "seconds": round(time.monotonic() - began, 1)}
        found |= {"code": process.returncode, "output": output, "errors": said}
        return {**found, "failed": cut_off} if cut_off else found

    def facts(self) -> dict[str, Any]:
        """What this machine is."""
        done = self.run(f"-c {shlex.quote(FACTS)} {self._device}", self._environ)
        if done.get("code") != 0:
            raise SystemExit(1)
        return dict(json.loads(done["output"]))

    def tests(self) -> dict[str, Any]:
        """Run the suite; counts and reasons."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "junit.xml")
            done = self.run(f"-m pytest -q tests/gpu --junitxml={report}", self._tests, TESTS_S)
            if not report.exists():
                return {"command": done["command"], "failed": last_lines(done)}
            cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - pytest has just written it
        kinds = Counter("passed" if not len(case) else case[0].tag for case in cases)
        names = [f"{case.get('classname')}.{case.get('name')}" for case in cases if failed(case)]
        if done["code"] not in (0, 1):
            names.append(f"pytest ended with code {done['code']}: not all tests have run")
        return {
            "command": f"FALLOW_TEST_DEVICE={self._device} python -m pytest -q tests/gpu",
            "seconds": done["seconds"],
            "passed": kinds["passed"],
            "skipped": dict(Counter(str(case[0].get("message")) for case in cases if skipped(case))),
            "failed": names,
        }

    def bench(self, bench: Bench, gpus: int) -> dict[str, Any]:
        """Measure, if there are GPUs enough."""
        words = f"{bench.command} --device {self._device}"
        if bench.gpus > gpus:
            return {"command": f"python {words}", "needs": f"{bench.gpus} GPUs"}
        done = self.run(words, self._environ)
        found = {"command": done["command"], "seconds": done.get("seconds"), "rows": rows_of(done)}
        if bench.smaller:
            found["smaller"] = bench.smaller
        if done.get("code") != 0:
            found["failed"] = last_lines(done)
        if found["rows"] and "failed" in found:
            found["note"] = "these rows were finished before it ended"
        return found


def end(process: subprocess.Popen[str]) -> str:
    """Have a process end by itself, with what it started and with its report. Returns its output."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            return process.communicate(timeout=_END_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def failed(case: ElementTree.Element) -> bool:
    """True if a test of the report failed."""
    return any(part.tag in ("failure", "error") for part in case)


def skipped(case: ElementTree.Element) -> bool:
    """True if a test of the report was skipped."""
    return any(part.tag == "skipped" for part in case)


def rows_of(done: dict[str, Any]) -> list[dict[str, Any]]:
    """What a benchmark has measured, whether it came to its end or not."""
    try:
        found = json.loads(done.get("output", ""))
    except json.JSONDecodeError:
        return []
    return list(found) if isinstance(found, list) else [found]


def last_lines(done: dict[str, Any]) -> str:
    """Of what a command said, for the report."""
    return str(done.get("failed") or f"exit code {done['code']}: {(done['errors'] or done['output'])[-500:]}".strip())


def driver() -> str | None:
    """Version of NVIDIA's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str | None:
    """Of this checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def environment(device: str, folder: Path) -> dict[str, str]:
    """Variables for what is started; the stand-in comes as packages for real devices do."""
    if device != "fake":
        return dict(os.environ)
    sys.path.insert(0, str(ROOT / "tests"))
    from accelerator import autoload

    environ: dict[str, str] = autoload.environment(folder)
    return environ


def main() -> int:
    """Write the report. Returns 1 if a test or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fallow-gpu-") as folder:
        session = Session(args.device, environment(args.device, Path(folder, "backend")))
        found: dict[str, Any] = {} if args.device == "cuda" else {"note": _NOTHING}
        found |= {"made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
        found |= {"python": platform.python_version(), "driver": driver(), "device": session.facts()}
        found["tests"] = session.tests()
        found["figures"] = []
        device = found["device"]
        for bench in on_gpus(device["free_gib"]) if args.device == "cuda" else ON_FAKE:
            found["figures"].append(session.bench(bench, device["count"]))
            # After each: what is known must outlive a machine that is taken away.
            args.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(bool(found["tests"].get("failed")) or any("failed" in one for one in found["figures"]))


if __name__ == "__main__":
    sys.exit(main())
