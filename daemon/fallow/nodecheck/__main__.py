"""`python -m fallow.nodecheck FOLDER SECONDS`: one srun task per node, which starts a worker for each of its GPUs.

A worker has the further arguments NODE RANK SIZE. No head is involved: workers exchange files in FOLDER.
"""

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from fallow.agent.launch import devices_here
from fallow.files import write_private

MEETING_S = 60.0
_POLL_S = 0.05


def main() -> int:
    """Start the workers of this node. Returns the first exit code that is not 0."""
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
        sys.stderr.write(f"{node}: some nodes did not answer within {MEETING_S:g} s; do all nodes see {folder}?\n")
        return 1
    before = [int(text) for text in counts]
    workers = []
    for number in range(count):
        words = [str(folder), measured_s, node, str(sum(before[:index]) + number), str(sum(before))]
        command = [sys.executable, "-Pm", "fallow.nodecheck", *words]
        workers.append(subprocess.Popen(command, env=os.environ | devices.share(number, count)))
    return next(filter(None, [worker.wait() for worker in workers]), 0)


class FolderGathers:
    """Gathers of `size` participants (`worker.transport.rendezvous.Gathers`).

    Args:
        folder: private folder that only these participants use.
        place: index of this participant, from 0.
        size: number of participants.
    """

    def __init__(self, folder: Path, place: int, size: int) -> None:
        self._folder, self._place, self._size = folder, place, size

    def give(self, key: str, part: bytes, *, within_node: bool = False) -> None:
        """Give this participant's part. `within_node` has no effect here."""
        write_private(self._file(key, self._place), part)

    def parts(self, key: str, timeout_s: float) -> list[bytes] | None:
        """Return all parts by place; None: some did not arrive within `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while self.missing(key):
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)
        return [self._file(key, place).read_bytes() for place in range(self._size)]

    def missing(self, key: str) -> list[int]:
        """Return the places whose part has not arrived."""
        files = {*self._folder.iterdir()}
        return [place for place in range(self._size) if self._file(key, place) not in files]

    def _file(self, key: str, place: int) -> Path:
        return self._folder / hashlib.sha256(f"{place} {key}".encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
