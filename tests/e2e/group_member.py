"""One member of real groups, a process that `test_groups.py` tells what to do.

The training thread does it; `interrupt` and questions about the process are the business of the thread that listens.
"""

import os
import queue
import threading
from multiprocessing.connection import Connection

import torch
from torch.distributed import PrefixStore, TCPStore

from fallow.worker.transport.build import build_group, reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Exchange, Interrupted

FLOATS = 1 << 18
"Elements of a sum: more than the kernel's buffers between two members take."


class Member:
    def __init__(self, store_port: int) -> None:
        self.store = TCPStore("127.0.0.1", store_port, is_master=False)
        self.group = Group(0, 0, 1)
        self.told: Exchange | None = None
        self.sums: list[torch.Tensor] = []

    def build(self, generation: int, rank: int, size: int) -> None:
        """Build the next group, and leave the former one to its reaper."""
        former = self.group
        store = PrefixStore(str(generation), self.store)
        self.group = build_group(generation, rank, size, store, "127.0.0.1", 20.0)
        if former.size > 1:
            former.interrupt("replaced")
            former.retire()
            reap(former)

    def launch_tell(self, text: str) -> None:
        self.told = self.group.tell(text.encode())

    def hear(self) -> list[str]:
        assert self.told is not None
        return [part.decode() for part in self.told.wait()]

    def gather(self, text: str) -> list[str]:
        return [part.decode() for part in self.group.gather(text.encode())]

    def launch_sum(self, value: float) -> None:
        self.sums.append(torch.full((FLOATS,), value))
        self.group.sum(self.sums[-1])

    def wait_and_verify(self) -> list[float]:
        """The sums since the last call: each one's value, if all its elements are equal."""
        self.group.wait_and_verify()
        sums, self.sums = self.sums, []
        return [float(one[0]) if bool((one == one[0]).all()) else float("nan") for one in sums]


def main(line: Connection, store_port: int) -> None:
    """Do what comes down the line, (name of a `Member` method, arguments), and answer (result, reason of an end)."""
    torch.set_num_threads(1)
    member = Member(store_port)
    todo: queue.Queue[tuple | None] = queue.Queue()

    def listen() -> None:
        while asked := line.recv():
            match asked:
                case "interrupt", reason:
                    member.group.interrupt(reason)
                case ["threads"]:
                    line.send(([thread.name for thread in threading.enumerate()], ""))
                case ["waits"]:
                    line.send((member.group.waiting, ""))
                case _:
                    todo.put(asked)
        todo.put(None)

    threading.Thread(target=listen, name="listener", daemon=True).start()
    while asked := todo.get():
        name, *arguments = asked
        try:
            line.send((getattr(member, name)(*arguments), ""))
        except Interrupted as error:
            assert member.group.broken is not None
            line.send((None, str(error)))
    os._exit(0)  # as a worker does that has left a group behind
