"""A process group that cannot be built because the peer goes silent; the process has to survive what follows."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import HashStore, ProcessGroupGloo

from fallow.model import FallowError
from fallow.worker.group import build_group

TIMEOUT_S = 0.3


def peer(store: HashStore) -> None:
    """Take part in the first collective and in no other."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    options._timeout = timedelta(seconds=20)
    group = ProcessGroupGloo(store, 1, 2, options)
    group.allreduce([torch.zeros(1)]).wait()
    time.sleep(20 * TIMEOUT_S)


def main() -> None:
    """Fail, and wait until nothing of it is left."""
    store = HashStore()
    other = threading.Thread(target=peer, args=(store,))
    other.start()
    try:
        build_group(1, 0, 2, store, "127.0.0.1", TIMEOUT_S)
    except FallowError as error:
        print(error.message)
    other.join()
    while any(thread.name.startswith("reaper") for thread in threading.enumerate()):
        time.sleep(0.01)
    print("alive", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
