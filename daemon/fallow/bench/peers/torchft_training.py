"""The benchmarks' training under torchft: one replica group of one process; settings of its own examples."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from fallow.bench import workload
from fallow.bench.steplog import StepLog


def main() -> None:
    """Train for ever; every replica notes the steps that were committed."""
    import torchft
    from torchft.ddp import PureDistributedDataParallel

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--lighthouse", required=True)
    args = parser.parse_args()
    model, optimizer = workload.make(args.params)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=args.replica,
        hostname="127.0.0.1",
    )
    # Not the one with torch's DDP in it: version 0.2.0 fails an assertion there when a peer is lost.
    wrapped = PureDistributedDataParallel(manager, model)
    acting = torchft.Optimizer(manager, optimizer)
    log, data = StepLog(args.notes, args.replica), workload.Text()
    index = 0
    while True:
        acting.zero_grad()
        tokens, targets = data[index]
        index += 1
        before = manager.current_step()
        workload.loss_of(wrapped, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
        acting.step()
        if manager.current_step() > before:
            log.finished(manager.current_step(), manager.num_participants())


if __name__ == "__main__":
    main()
