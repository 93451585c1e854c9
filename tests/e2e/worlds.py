"""Fixed worlds of any size, forked from one process that has imported torch: 30 ms a rank instead of 2 s.

The process that forks must be bare: it computes nothing by itself, so that it has one thread.
"""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.transport.build import build_group

LINGER = timedelta(seconds=180)
"""How long a rank that was refused, or has a result, waits for others: they learn of it over its connections."""


class Refused(str):
    """The text of the error with which a rank has ended."""

    __slots__ = ()


def world(size: int, work: Callable[[Run], Any]) -> list[Any]:
    """Call `work` on each rank of a new world.

    Returns:
        What it gave, by rank; a `Refused` where it raised an error.
    """
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> None:
            store = torch.distributed.FileStore(f"{folder}/store", size) if size > 1 else None
            run, raised = Run(None, build_group(1, rank, size, store, "127.0.0.1", 180)), False
            try:
                found = work(run)
            except FallowError as error:
                found = Refused(error.message)
            except Exception as error:
                found, raised = Refused(f"{type(error).__name__}: {error}"), True
            Path(folder, f"{rank}.result").write_bytes(pickle.dumps(found))
            if store is not None:
                store.set(f"ended {rank}", "")
                if not raised:
                    store.wait([f"ended {other}" for other in range(size)], LINGER)

        forked(rank_of, size)
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(size)]


def forked(work: Callable[[int], None], size: int) -> None:
    """Call `work(rank)` in `size` processes; ends this one if one of them fails."""
    children = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            try:
                work(rank)
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        children.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in children]):  # noqa: C419  # all must be waited for
        raise SystemExit(f"a rank of {size} failed")
