"""A worker process for `test_wire_frames`: it repeats what its agent orders, or ends in one of several ways."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from fallow.core.membership.messages import Fault, Order
from fallow.core.protocol import Heard, Status, ToWorker
from fallow.wire.frames import AgentChannel


def main(how: str, descriptor: int, number: int) -> None:
    ended = threading.Event()
    seen: list[str] = []

    def hear(message: ToWorker) -> None:
        seen.append(type(message).__name__)
        match message:
            case Order():
                channel.send(Status(term=message.term, edition=message.edition, step=len(seen)))
            case Heard():
                ended.set()

    def end(reason: str) -> None:
        print("end", reason or "without words", *seen, flush=True)
        ended.set()

    channel = AgentChannel(descriptor, hear, end)
    if how == "deaf":
        for step in range(number):
            channel.send(Status(step=step))
        os.kill(os.getpid(), signal.SIGKILL)
    channel.start()
    if how == "parent":
        # Whatever a script leaves behind has the socket, too.
        child = os.fork()
        if child == 0:
            time.sleep(60)
        print(child, flush=True)
    channel.send(Status(generation=number))
    ended.wait()
    if how == "parent":
        channel.send(Status(fault=Fault(code=1, message="x" * number)))
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ["FALLOW_CHANNEL_FD"]), int(sys.argv[2]))
