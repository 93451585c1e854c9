"""`python -m fallow.nodecheck FOLDER SECONDS`: one task of srun per node, which starts a worker for each GPU there.

A worker's arguments go on with NODE RANK SIZE.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from fallow.agent.launch import devices_here
from fallow.nodecheck.meeting import FolderGathers

MEETING_S = 60.0


def main() -> int:
    """Start the workers of this node; ends with the first exit code that is not 0."""
    folder, measured_s = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        from fallow.nodecheck.worker import work

        work(folder, float(measured_s), sys.argv[3], rank=int(sys.argv[4]), size=int(sys.argv[5]))
    devices = devices_here()
    node, count = os.environ.get("SLURMD_NODENAME", socket.gethostname()), devices.count or 1
    index, nodes = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    gathers = FolderGathers(folder, index, nodes)
    gathers.give("workers", str(count).encode())
    counts = gathers.parts("workers", MEETING_S)
    if counts is None:
        sys.stderr.write(f"{node}: not all nodes came within {MEETING_S:g} s; do they all see {folder}?\n")
        return 1
    before = [int(text) for text in counts]
    workers = []
    for number in range(count):
        words = [str(folder), measured_s, node, str(sum(before[:index]) + number), str(sum(before))]
        command = [sys.executable, "-m", "fallow.nodecheck", *words]
        workers.append(subprocess.Popen(command, env=os.environ | devices.share(number, count)))
    return next(filter(None, [worker.wait() for worker in workers]), 0)


if __name__ == "__main__":
    sys.exit(main())
