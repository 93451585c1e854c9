"""Process groups that are of no use: the peer goes silent, comes too late, or too late for its second connection.

The process has to survive what follows.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from fallow.model import FallowError
from fallow.worker.transport.build import build_group, reap
from fallow.worker.transport.stream import Streams
from fallow.worker.transport.waits import Interrupted

TIMEOUT_S = 0.5


def peer(store: HashStore, late_for: str) -> None:
    """Meet, and then connect in time or when the other has given up."""
    streams = Streams(1, 1, 2, "127.0.0.1")
    streams.meet(store, TIMEOUT_S)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = timedelta(seconds=2 * TIMEOUT_S)
    groups = []
    with contextlib.suppress(RuntimeError):
        for name in ("control", "sums"):
            if name == late_for:
                time.sleep(2 * TIMEOUT_S)
            groups.append(ProcessGroupGloo(PrefixStore(name, store), 1, 2, options))
        time.sleep(12 * TIMEOUT_S)
    del groups


def fail(late_for: str) -> None:
    """Fail, and wait until nothing of it is left."""
    store = HashStore()
    other = threading.Thread(target=peer, args=(store, late_for))
    other.start()
    try:
        group = build_group(1, 0, 2, store, "127.0.0.1", TIMEOUT_S)
        threading.Timer(TIMEOUT_S, group.interrupt, ["the peer is silent"]).start()
        group.tell(b"first").wait()
    except FallowError as error:
        print(error.message)
        other.join()  # with the error at hand, as a caller may keep it
    except Interrupted as error:
        print(error)
        reap(group)
    other.join()
    while any(thread.name.startswith("reaper") for thread in threading.enumerate()):
        time.sleep(0.01)


if __name__ == "__main__":
    for late_for in ("", "control", "sums"):
        fail(late_for)
    print("alive", flush=True)
    os._exit(0)
