"""`python -m fallow.worker.torchrun.restart COMMAND...`: torchrun's agent for one worker, with Fallow's options.

`fallow run --restart` starts this process as a worker. Each generation starts COMMAND again.
"""

import os
import sys
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from fallow.worker.api import process
from fallow.worker.torchrun.backend import RESTART, create_handler

_CHILD_PROCESS = str(Path(__file__).with_name("child_process.py"))


def main(command: list[str]) -> None:
    """Serve until the script has ended for good."""
    process.die_with_parent()
    process.leave_sigterm_to_the_head()
    # Every worker has one process, so torchrun's agents need not exchange their numbers of processes.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ[RESTART] = "1"
    rendezvous_handler_registry.register("fallow", create_handler)
    options = [
        "--rdzv-backend=fallow",
        "--rdzv-endpoint=head",  # unused, but torchrun warns without it
        "--nnodes=1",
        "--nproc-per-node=1",
        "--max-restarts=1000000000",  # the handler counts restarts together with the other members
        "--monitor-interval=0.1",
        "--signals-to-handle=SIGINT",
        "--no-python",
    ]
    torchrun.main([*options, sys.executable, "-S", _CHILD_PROCESS, str(os.getpid()), *command])


if __name__ == "__main__":
    main(sys.argv[1:])
