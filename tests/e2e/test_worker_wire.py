"""`fallow.init` in a process that was started as an agent starts it, over the real ZeroMQ link."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from fallow.model import (
    BeatAck,
    Commit,
    Finished,
    Peer,
    Prepare,
    Vote,
    Welcome,
    WorkerHello,
    WorkerReady,
    WorkerSecret,
)
from fallow.wire.keys import new_keypair
from fallow.wire.router import Router

EXAMPLE = Path(__file__).parents[2] / "contrib" / "examples" / "digits_cnn.py"


async def serve(router: Router, folder: Path) -> tuple[Finished, WorkerHello]:
    hello: WorkerHello | None = None
    while True:
        peer, message = await router.recv()
        match message:
            case WorkerHello():
                hello = message
                router.send(
                    peer,
                    Welcome(
                        term=1,
                        run="r",
                        seed=0,
                        max_workers=1,
                        beat_s=0.1,
                        lease_s=10,
                        head_patience_s=30,
                        folder=str(folder),
                    ),
                )
            case WorkerReady():
                members = [Peer(worker="w0", address="127.0.0.1")]
                router.send(
                    peer,
                    Prepare(term=1, generation=1, replaces=0, members=members, interrupt=False, timeout_s=10),
                )
            case Vote():
                assert message.ok
                router.send(peer, Commit(term=1, generation=1))
            case Finished():
                assert hello is not None
                router.send(peer, BeatAck(term=1))
                return message, hello
            case _:
                router.send(peer, BeatAck(term=1, ready=True))


async def test_an_agents_worker_finds_the_head_by_its_pipe(tmp_path: Path) -> None:
    head_public, head_secret = new_keypair()
    public, secret = new_keypair()
    router = Router(head_public, head_secret, lambda key: key == public)
    endpoint = await router.start("127.0.0.1", None)
    reading, writing = os.pipe()
    channel = WorkerSecret(
        endpoint=endpoint,
        server_key=head_public,
        public_key=public,
        secret_key=secret,
        head_file=None,
        address="127.0.0.1",
    )
    os.write(writing, msgspec.msgpack.encode(channel))
    os.close(writing)
    process = subprocess.Popen(  # noqa: ASYNC220  # as an agent does it
        [sys.executable, str(EXAMPLE), "--epochs", "2"],
        env={**os.environ, "FALLOW_WORKER": "w0", "FALLOW_RUN": "r", "FALLOW_CHANNEL_FD": str(reading)},
        pass_fds=[reading],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    try:
        finished, hello = await asyncio.wait_for(serve(router, tmp_path), 60)
        output, _ = await asyncio.to_thread(process.communicate)
    finally:
        process.kill()
        process.wait()
        await router.close()
    assert process.returncode == 0
    assert (hello.worker, finished.worker, finished.steps, finished.samples) == ("w0", "w0", 30, 3000)
    assert "accuracy 0." in output
    assert (tmp_path / "ledger" / "w0.ledger").stat().st_mode & 0o777 == 0o600
