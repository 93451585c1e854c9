"""A script for torchrun that knows nothing of Fallow; for `--restart`: restarted_training.py FOLDER [--told]

It saves its step in FOLDER, goes on from there, writes a line for each start, and ends some steps after it has been
left alone; with --told as soon as a file `hurry` is in FOLDER. Each step is a sleep, so that it starts at once.
"""

import os
import socket
import sys
import time
from pathlib import Path

STEPS_ALONE = 20


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    at = folder / "step"
    began = step = int(at.read_text()) if at.exists() else 0
    # The store in which the processes would meet is there.
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
    with (folder / "starts").open("a") as starts:
        starts.write(f"{rank} {size} {step}\n")
    told = "--told" in sys.argv
    while not (folder / "hurry").exists() if told else size > 1 or step < began + STEPS_ALONE:
        time.sleep(0.02)
        step += 1
        if rank == 0:
            part = folder / "step.part"
            part.write_text(str(step))
            part.replace(at)


if __name__ == "__main__":
    main()
