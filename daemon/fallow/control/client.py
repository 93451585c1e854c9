"""Client of the control socket: how the command line asks the head."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from fallow.control.protocol import MAX_ANSWER, MAX_REQUEST, Answer, peer_uid, to_error
from fallow.files import read_struct
from fallow.model import EventRecord, Exit, FallowError, HeadFile, Snapshot
from fallow.text import quote
from fallow.threads import COUNT_S

T = TypeVar("T")

TIMEOUT_S = 30.0
COUNT_TIMEOUTS_S = dict.fromkeys(("report", "prune"), COUNT_S + TIMEOUT_S)
"Longest waits for the answers to methods that count samples."
CONNECT_S = 5.0
WATCH_S = 0.5
RECENT_EVENTS, MOST_EVENTS = 200, 10_000
"Maximum number of past events that `watch` yields, and of events in one request."

START_ADVICE = "start one with: fallow daemon"


def find_head(head_file: Path) -> HeadFile:
    """Read `head.json`.

    Raises:
        FallowError: no head runs, or it runs on another host.
    """
    try:
        head = read_struct(head_file, HeadFile)
    except FileNotFoundError:
        raise FallowError(f"no head is running for {head_file.parent}; {START_ADVICE}", Exit.UNAVAILABLE) from None
    this_host = socket.gethostname()
    if head.host != this_host:
        raise FallowError(
            f"the head of {head_file.parent} runs on {head.host} (pid {head.pid}), this is {this_host}; "
            f"ask it there: ssh {head.host} fallow …"
            + (f", or have one here take its place: {START_ADVICE.partition(': ')[2]}" if head.stand_in else ""),
            Exit.UNAVAILABLE,
        )
    return head


class ControlClient:
    """One connection to a head. Create it with `connect`; close it with `aclose` or as an async context manager."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, head_file: Path) -> "ControlClient":
        """Connect to the head that `head_file` (`Paths.head_file`) names."""
        head = find_head(head_file)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(head.control, limit=MAX_ANSWER)
        except TimeoutError:
            raise FallowError(
                f"the head of {head_file.parent} (pid {head.pid} on {head.host}) does not take connections; "
                "it may be stopped or overloaded",
                Exit.TEMPFAIL,
            ) from None
        except OSError as error:
            raise _connection_error(head_file, head, error) from error
        if peer_uid(writer.get_extra_info("socket")) != os.getuid():
            writer.close()
            raise FallowError(f"{head.control} is served by another user; not used", Exit.NOPERM)
        return cls(reader, writer)

    async def __aenter__(self) -> "ControlClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._writer.close()

    @overload
    async def call(self, method: str, *, timeout_s: float | None = None, **params: Any) -> Any: ...
    @overload
    async def call(self, method: str, type_: type[T], *, timeout_s: float | None = None, **params: Any) -> T: ...
    async def call(self, method: str, type_: Any = Any, *, timeout_s: float | None = None, **params: Any) -> Any:
        """Send one request and return the answer, decoded as `type_`. Raises the head's FallowError."""
        limit_s = COUNT_TIMEOUTS_S.get(method, TIMEOUT_S) if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._ask(method, params)
                answer = await self._read()
        except TimeoutError:
            self._writer.transport.abort()  # a late answer would be taken for the answer to the next request
            raise FallowError(
                f"the head did not answer {method} within {limit_s:g} s; it may still carry it out",
                Exit.TEMPFAIL,
            ) from None
        if answer is None:
            raise FallowError(f"the head went away before it answered {method}", Exit.UNAVAILABLE)
        if bytes(answer.result) in (b"", b"null"):
            return None
        try:
            return msgspec.json.decode(answer.result, type=type_)
        except msgspec.ValidationError as error:
            raise FallowError(
                f"the head's answer to {method} is not understood ({error}); it may be of another version",
                Exit.DATA,
            ) from error

    async def watch(self) -> AsyncIterator[Snapshot | EventRecord]:
        """Yield the head's state twice a second, and its events: recent ones first, then all new ones.

        Each snapshot is followed by the events up to its `last_event`, except while the store is unavailable.
        """
        last_seq, limit = 0, RECENT_EVENTS
        while True:
            snapshot = await self.call("status", Snapshot)
            yield snapshot
            if last_seq < snapshot.last_event and not snapshot.head.store_problem:
                try:
                    events = await self.call("events", list[EventRecord], since=last_seq, limit=limit)
                except FallowError as error:
                    if error.code is not Exit.UNAVAILABLE:
                        raise
                else:
                    for event in events:
                        if event.seq <= snapshot.last_event:
                            yield event
                    last_seq, limit = snapshot.last_event, MOST_EVENTS
            await asyncio.sleep(WATCH_S)

    async def _ask(self, method: str, params: dict[str, Any]) -> None:
        try:
            line = msgspec.json.encode({"method": method, "params": params}) + b"\n"
        except UnicodeEncodeError as error:
            raise FallowError(
                f"{method}: {quote(error.object[:128])} is not valid UTF-8; rename what is called so", Exit.DATA
            ) from error
        if len(line) > MAX_REQUEST:
            raise FallowError(
                f"{method} would be {len(line)} bytes long; {MAX_REQUEST} are allowed "
                "(a smaller batch script or environment is needed)",
                Exit.DATA,
            )
        try:
            self._writer.write(line)
            await self._writer.drain()
        except ConnectionError:
            # The head may have sent a reason before it closed, so the caller still reads the answer.
            return

    async def _read(self) -> Answer | None:
        try:
            line = await self._reader.readuntil(b"\n")
            answer = msgspec.json.decode(line, type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except (asyncio.LimitOverrunError, msgspec.DecodeError) as error:
            raise FallowError(f"the head's answer is not understood: {error}", Exit.DATA) from error
        if answer.error is not None:
            raise to_error(answer.error)
        return answer


@overload
def call(head_file: Path, method: str, *, timeout_s: float | None = None, **params: Any) -> Any: ...
@overload
def call(head_file: Path, method: str, type_: type[T], *, timeout_s: float | None = None, **params: Any) -> T: ...
def call(head_file: Path, method: str, type_: Any = Any, *, timeout_s: float | None = None, **params: Any) -> Any:
    """Connect, send one request, and close. For code without an event loop."""

    async def ask() -> Any:
        async with await ControlClient.connect(head_file) as client:
            return await client.call(method, type_, timeout_s=timeout_s, **params)

    return asyncio.run(ask())


def _connection_error(head_file: Path, head: HeadFile, error: OSError) -> FallowError:
    where = f"the head of {head_file.parent} (pid {head.pid} on {head.host})"
    if Path(f"/proc/{head.pid}").exists():
        text = f"{where} does not answer on {head.control} ({error.strerror or error}); look at its log"
    else:
        text = f"{where} is gone; {START_ADVICE}"
    return FallowError(text, Exit.UNAVAILABLE)
