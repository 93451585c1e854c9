"""Server of the control socket: the head answers the command line."""

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from fallow.control.protocol import MAX_REQUEST, Request, error_line, peer_uid
from fallow.files import private_dir
from fallow.model import Exit, FallowError

IDLE_S = 3600.0
"""A connection without a request for this time is closed."""

SLOW_S = 10.0
"""A client that does not read its answer within this time is disconnected."""

MAX_CONNECTIONS = 64

log = structlog.get_logger(__name__)


class ControlServer:
    """A Unix socket in a private folder. Only processes of our own user are answered.

    The head's lease decides which head may serve, so a socket that an earlier head has left is replaced.

    Args:
        path: path of the socket.
        handle: executes one request (method, parameters) and returns JSON. It may raise FallowError only, whose message
            goes to the client.
    """

    def __init__(self, path: Path, handle: Callable[[str, dict[str, Any]], Awaitable[msgspec.Raw]]) -> None:
        self.path = path
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._peers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        private_dir(self.path.parent)
        # The private folder already keeps other users out; the socket's mode is a second protection.
        old = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._accept, path=str(self.path), limit=MAX_REQUEST, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise FallowError(f"{self.path} exists and is no socket; remove it", Exit.CANTCREAT) from error
        finally:
            os.umask(old)
        self._inode = self.path.stat().st_ino

    async def close(self) -> None:
        """Stop listening, close all connections and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for peer in list(self._peers):
            peer.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)
        self._server = None
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:  # not the socket of a head that has taken over
                self.path.unlink()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._peers.add(task)
        try:
            if len(self._peers) > MAX_CONNECTIONS:
                busy = "the head has too many control connections open; close some"
                writer.write(error_line(FallowError(busy, Exit.TEMPFAIL)))
            elif (uid := peer_uid(writer.get_extra_info("socket"))) != os.getuid():
                log.warning("control.refused", uid=uid)
            else:
                await self._serve(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._peers.discard(task)
            # A client that did not read its answer in time must not delay the close.
            if writer.transport.get_write_buffer_size() > MAX_REQUEST:
                writer.transport.abort()
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                too_long = f"a request may be {MAX_REQUEST} bytes long"
                await _send(writer, error_line(FallowError(too_long, Exit.DATA)))
                return
            try:
                request = _parse(line)
                result = await self._handle(request.method, request.params)
                answer = msgspec.json.encode({"result": result}) + b"\n"
            except FallowError as error:
                answer = error_line(error)
            await _send(writer, answer)


async def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    try:
        async with asyncio.timeout(SLOW_S):
            await writer.drain()
    except TimeoutError:
        log.warning("control.slow", dropped=True)
        writer.transport.abort()
        raise


def _parse(line: bytes) -> Request:
    try:
        return msgspec.json.decode(line, type=Request)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FallowError(f"this is no request: {str(error)[:200]}", Exit.DATA) from error
