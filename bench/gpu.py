"""Run the tests and the benchmarks on this machine's GPUs, in less than ten minutes, and write one JSON file.

python -m bench.gpu --out gpu.json            # same as `make bench-gpu`
python -m bench.gpu --device fake             # tries this script on the tests' fake device; figures mean nothing
"""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, TESTS_S = 530.0, 330.0
"""Longest duration of the whole run, and of its tests."""

END_S = 40.0
"""Time from SIGINT to SIGKILL for a command that is over its limit."""

TESTS = "-m pytest -q -p no:cacheprovider -rfEs tests/gpu"
BENCHES = [
    (1, "steady --members 1 --params 100 --n 16"),
    (1, "pause --members 1 --params {large} --n 2"),
    (1, "pause --members 1 --params 25 --n 8"),
    (1, "recovery --members 2 --params 25 --n 4"),
    (1, "reproducible --members 1 --params 100 --n 16"),
    (2, "steady reproducible --members 2 --params 100 --n 16"),
    (4, "pause recovery --members 2 --params 100 --n 4"),
]
"""(GPUs that the benchmark needs to sum gradients on them, arguments). Time may be up before the last one."""

LARGE, BYTES = 1000, 25
"""Millions of parameters of the largest model, and bytes of GPU memory per parameter in each worker: weights 2,
optimizer 12, sums 2, and a margin."""

FACTS = """import json, platform, subprocess, torch
def printed(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
facts = {"count": torch.accelerator.device_count(), "torch": torch.__version__, "cuda": torch.version.cuda}
facts |= {"python": platform.python_version(), "commit": printed("git", "rev-parse", "HEAD")}
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    facts["name"], facts["nccl"] = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.nccl.version()))
    facts["memory_gib"], facts["free_gib"] = round(total / 2**30, 1), round(free / 2**30, 1)
    facts["driver"] = printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
print(json.dumps(facts))
"""


def large(free_gib: float) -> int:
    """Millions of parameters, at most `LARGE`, of a model of which two workers fit into `free_gib`."""
    return min(LARGE, max(25, int(free_gib * 2**30 / (2 * BYTES * 1e6)) // 25 * 25))


def run(words: str, environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run Python with these arguments.

    Returns:
        The command, its `seconds`, its output (`rows` if it is JSON, else the last lines as `output`), and the reason
        if it failed (`failed`).
    """
    report: dict[str, Any] = {"command": f"python {words}"}
    if limit_s < 1.0:
        return report | {"failed": f"not started: {LIMIT_S:g} s were over"}
    print(f"gpu: {report['command'].splitlines()[0]}", file=sys.stderr, flush=True)
    began = time.monotonic()
    # After SIGINT a benchmark ends its processes and prints the complete rows.
    limit = ["timeout", "--foreground", "--signal=INT", f"--kill-after={END_S:g}", f"{limit_s:.1f}"]
    argv = [*limit, sys.executable, *shlex.split(words)]
    process = subprocess.run(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    report["seconds"] = round(time.monotonic() - began, 1)
    if process.returncode:
        cut_off = time.monotonic() - began >= limit_s
        report["failed"] = f"cut off: its {limit_s:.0f} s were over" if cut_off else f"exit code {process.returncode}"
    try:
        return report | {"rows": json.loads(process.stdout)}
    except json.JSONDecodeError:
        return report | {"output": process.stdout.splitlines()[-100:]}


def main() -> int:
    """Write the report. Returns 1 if a test or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    tests = environ = {**os.environ, "FALLOW_TEST_DEVICE": args.device, "FALLOW_REQUIRE_ACCELERATOR": "1"}
    end = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory(prefix="fallow-gpu-") as folder:
        if args.device == "fake":  # torch loads the fake device as an installed backend package
            sys.path.insert(0, str(ROOT / "tests"))
            environ = importlib.import_module("accelerator.autoload").environment(Path(folder, "backend"), tests)
        device = run(f"-c {shlex.quote(FACTS)}", environ, LIMIT_S).get("rows", {})
        if not device.get("count"):
            print("gpu: torch finds no GPU. Check nvidia-smi and torch.version.cuda.", file=sys.stderr)
            return 1
        made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        report: dict[str, Any] = {"kind": args.device, "made_at": made_at, "device": device}
        report |= {"tests": run(TESTS, tests, TESTS_S), "figures": []}
        for gpus, words in BENCHES:
            words = words.format(large=large(device.get("free_gib", 0)))
            if args.device == "fake":
                words = re.sub(r"--params \d+ --n \d+", "--params 0.1 --n 2", words)
            bench = f"-m bench --json --device {args.device} {words}"
            if gpus <= device["count"]:
                report["figures"].append(run(bench, environ, end - time.monotonic()))
            else:
                report["figures"].append({"command": f"python {bench}", "needs": f"{gpus} GPUs"})
            # Write after each benchmark: the machine may be taken away.
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(any("failed" in each for each in [report["tests"], *report["figures"]]))


if __name__ == "__main__":
    sys.exit(main())
