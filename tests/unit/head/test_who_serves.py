"""Which head serves a folder: leases, and heads that agents start."""

import asyncio
import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.agent.stand_in import RETRY_S, TURN_S, StandIn, head_environment
from fallow.config import Config, HeadSection, Membership
from fallow.files import Paths, private_dir, write_struct
from fallow.head.main import exclusive_lease, former_config, main
from fallow.head.state.lease import BEAT_S, VALID_S, WATCH_S, Lease, copy_store_files
from fallow.model import Exit, FallowError, HeadFile
from fallow.wire.address import FILES, allow_connections
from head_in_process import HungFiles
from waiting import wait_for


class World:
    """Hosts that share a folder, no locks, and no clock but this one."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths(state=folder / "state", runtime=folder / "run").create()
        self.now = 0.0
        self.beside: Callable[[], None] = lambda: None
        "what happens elsewhere meanwhile"

    def lease(self, place: str) -> Lease:
        return Lease(self.paths, place=place, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.beside()

    def may_act(self, lease: Lease) -> bool:
        """Whether that head would change something now, without a look at the file."""

        async def ask() -> bool:
            try:
                async with asyncio.timeout(0):
                    await lease.confirm(changing=True)
            except TimeoutError:
                return False
            return True

        return asyncio.run(ask())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_head_that_lives_on_another_host_is_noticed_and_named(world: World) -> None:
    first = world.lease("login1")
    first.acquire()
    beats = []

    def beat() -> None:
        if world.now >= BEAT_S * (len(beats) + 1):
            beats.append(world.now)
            first.renew()

    world.beside = beat
    with pytest.raises(FallowError, match=rf"^another head \(pid \d+ on {os.uname().nodename}\) serves ") as caught:
        world.lease("login2").acquire()
    assert caught.value.code is Exit.CANTCREAT
    assert world.now < 2 * BEAT_S, "noticed at its first sign of life"
    assert world.may_act(first)


def test_a_head_of_the_same_place_that_was_killed_is_not_waited_for(world: World) -> None:
    code = (
        "import sys; from pathlib import Path; from fallow.files import Paths;"
        "from fallow.head.state.lease import Lease;"
        "Lease(Paths(Path(sys.argv[1]), Path(sys.argv[2])), place='login1').acquire()"
    )
    words = [sys.executable, "-c", code, str(world.paths.state), str(world.paths.runtime)]
    subprocess.run(words, check=True, timeout=120)
    assert world.paths.head_leases
    world.lease("login1").acquire()
    assert world.now == 0.0


def test_a_head_ends_though_its_folder_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.head.main.FILES_S", 0.1)
    serving = contextlib.ExitStack()
    serving.enter_context(exclusive_lease(world.paths))
    with HungFiles(world.paths.state) as hung:
        serving.close()
        wait_for("the lease is being removed", lambda: hung.calls)
        assert not hung.used_by_loop
    wait_for("the folder answers, and the lease ends", lambda: not world.paths.head_leases)


def test_who_watches_takes_over_as_soon_as_the_folder_is_given_up(world: World) -> None:
    first = world.lease("login1")
    first.acquire()
    world.beside = first.release
    second = world.lease("login2")
    second.acquire()
    assert world.now < BEAT_S
    assert world.may_act(second)


def test_of_a_dead_host_the_folder_is_taken_over_after_a_watch(world: World) -> None:
    world.lease("login1").acquire()
    world.lease("login2").acquire()
    assert WATCH_S <= world.now < WATCH_S + 1.0


def test_a_head_that_stood_still_does_nothing_more_and_ends(world: World) -> None:
    first, second = world.lease("login1"), world.lease("login2")
    first.acquire()
    assert world.may_act(first)
    world.now += VALID_S + 0.1
    assert not world.may_act(first), "it does not know whether it was replaced"
    second.acquire()
    assert not world.may_act(first)
    first.renew()
    with pytest.raises(FallowError, match=rf"the head on {os.uname().nodename} \(pid \d+\) has taken over") as caught:
        asyncio.run(first.confirm(changing=False))
    assert caught.value.code is Exit.CANTCREAT
    assert world.may_act(second)
    first.release()
    second.renew()
    assert world.may_act(second), "who was replaced takes nothing away"


def test_a_head_whose_folder_is_away_waits_for_it_and_ends_only_after_a_long_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, state = world.lease("login1"), world.paths.state
    lease.acquire()
    world.paths.term.write_bytes(b"1")
    for mounted_on in (False, True):
        away = state.rename(state.with_name("away"))
        if mounted_on:
            state.mkdir()
        world.now += VALID_S + 0.1
        lease.renew()
        assert not world.may_act(lease), "nobody has taken it over, as far as can be seen"
        if mounted_on:
            state.rmdir()
        away.rename(state)
        lease.renew()
        assert world.may_act(lease)
    world.now += VALID_S + 0.1

    async def pass_by(seconds: float) -> None:
        world.now += seconds

    told: list[str] = []
    monkeypatch.setattr(asyncio, "sleep", pass_by)
    with pytest.raises(FallowError, match="cannot be written to for 300 s") as caught:
        asyncio.run(lease.confirm(changing=True, waits=told.append))
    assert caught.value.code is Exit.TEMPFAIL
    assert len(told) > 100, "a watchdog is fed meanwhile"


def test_of_two_that_take_over_at_once_one_stays(world: World) -> None:
    world.lease("login1").acquire()
    second, third = world.lease("login2"), world.lease("login3")

    def also() -> None:
        if world.beside is also:
            world.beside = lambda: None
            third.acquire()  # it ends its watch while the second still watches

    world.beside = also
    with pytest.raises(FallowError, match="another head"):
        second.acquire()
    assert world.may_act(third)


def test_a_head_whose_folder_hung_until_it_was_replaced_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.lease("login1"), world.lease("login2")
    first.acquire()
    write = os.pwrite

    def hang(*args: Any) -> int:
        monkeypatch.undo()
        second.acquire()
        return write(*args)

    monkeypatch.setattr(os, "pwrite", hang)
    first.renew()
    first.renew()
    with pytest.raises(FallowError, match="has taken over"):
        asyncio.run(first.confirm(changing=False))
    second.renew()
    assert world.may_act(second)


def test_what_a_former_server_still_writes_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    file = folder / "appendonly.aof.1.incr.aof"
    file.write_bytes(b"before")
    with open(file, "ab", buffering=0) as former:
        copy_store_files(tmp_path)
        former.write(b" after")
    assert file.read_bytes() == b"before"
    assert [path.name for path in folder.iterdir()] == [file.name]


# -- when an agent starts a head, with which environment, and how that head ends --------------------------------------


WAITS = "import sys; open(sys.argv[1], 'w').write('up'); sys.stdin.read()"
FAILS = "import sys; sys.exit('another head serves it')"


def made(tmp_path: Path, code: str, **environ: str) -> StandIn:
    command = (sys.executable, "-c", code)
    return StandIn(tmp_path, str(tmp_path / "started"), 600.0, tmp_path / "head.log", environ, command)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("place", "silent_s"), [("0", 600.0), ("2", 600.0 + 2 * TURN_S)])
def test_a_head_is_started_when_none_was_heard_for_long_enough(tmp_path: Path, place: str, silent_s: float) -> None:
    stand_in = made(tmp_path, WAITS, SLURM_PROCID=place)
    log = tmp_path / "head.log"
    stand_in.tend(1.0, silent_s - 1.0)
    assert not log.exists()
    stand_in.tend(2.0, silent_s)
    until((tmp_path / "started").exists)
    assert log.stat().st_mode & 0o777 == 0o600
    stand_in.stop()


def test_a_head_that_cannot_serve_is_tried_again_ever_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
        starts.append(popen(*args, **options))  # type: ignore[call-overload]
        return starts[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    stand_in = made(tmp_path, FAILS)
    log = tmp_path / "head.log"
    times = []
    for now in range(600):
        before = len(starts)
        stand_in.tend(float(now), 600.0)
        if len(starts) > before:
            times.append(now)
            starts[-1].wait(120)
    # The end is seen a second after the start; then the wait begins.
    waits = [after - before - 1 for before, after in itertools.pairwise(times)]
    assert waits[:5] == [5, 10, 20, 40, 60]
    assert set(waits[4:]) == {RETRY_S[1]}
    assert caplog.text.count(f"the stand-in head has ended with 1: another head serves it; its log: {log}") == 1


def test_a_head_that_cannot_even_be_started_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    command = (str(python), "-c", WAITS)
    stand_in = StandIn(tmp_path, str(tmp_path / "started"), 600.0, tmp_path / "head.log", {}, command)
    stand_in.tend(1.0, 600.0)
    assert f"cannot be started: [Errno 2] No such file or directory: '{python}'" in caplog.text
    python.symlink_to(sys.executable)  # the file system is back
    stand_in.tend(RETRY_S[0], 600.0)
    assert not (tmp_path / "started").exists()
    stand_in.tend(1.0 + RETRY_S[0], 600.0)
    until((tmp_path / "started").exists)
    stand_in.stop()


def test_a_head_inside_of_a_job_has_nothing_of_the_job_in_its_environment() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SBATCH_QOS": "q",
        "SRUN_CPUS_PER_TASK": "2",
        "FALLOW_TOKEN": "t",
        "FALLOW_HEAD__ADDRESS": "10.0.0.1",
        "CUDA_VISIBLE_DEVICES": "0",
        "NOTIFY_SOCKET": "/run/x",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "HOME": "/home/ada"}
    assert head_environment({**job, **kept}) == kept


def test_a_stand_in_head_has_the_configuration_of_the_head_before_it(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    with pytest.raises(FallowError, match=r"head-config\.json: missing; start a head with `fallow daemon`") as caught:
        former_config(paths, "10.0.0.7")
    assert caught.value.code is Exit.NOINPUT
    former = Config(
        head=HeadSection(address="10.0.0.1", port=4711, redis_url="redis://r", prometheus_port=9000),
        membership=Membership(head_patience_s=7.0),
    )
    write_struct(paths.head_config, former)
    config = former_config(paths, "10.0.0.7")
    assert config.head == HeadSection(address="10.0.0.7", redis_url="redis://r")
    assert msgspec.structs.replace(config, head=former.head) == former


def head_file(*, stand_in: bool) -> HeadFile:
    where = {"host": "n1", "pid": 1, "endpoint": "tcp://10.0.0.7:1", "control": "/c"}
    return HeadFile(version="1", term=1, public_key="k" * 40, started_at=0.0, stand_in=stand_in, **where)


def test_a_head_that_starts_asks_a_stand_in_head_to_give_way_and_no_other(tmp_path: Path) -> None:
    paths = Paths(private_dir(tmp_path / "state"), private_dir(tmp_path / "run")).create()
    write_struct(paths.head_file, head_file(stand_in=False))
    with exclusive_lease(paths):
        with (
            pytest.raises(FallowError, match=rf"another head \(pid {os.getpid()} on ") as caught,
            exclusive_lease(paths, wait_s=60.0),
        ):
            pass
        assert caught.value.code is Exit.CANTCREAT, "systemd does not"
        assert not paths.head_wanted.exists()
        write_struct(paths.head_file, head_file(stand_in=True))
        with (
            pytest.raises(FallowError, match=r"stand-in head does not end") as caught,
            exclusive_lease(paths, wait_s=1.0),
        ):
            pass
        assert caught.value.code is Exit.TEMPFAIL, "systemd starts the head again"
        assert paths.head_wanted.exists()
    with exclusive_lease(paths, wait_s=60.0):
        assert not paths.head_wanted.exists()


@pytest.mark.parametrize("missing", ["state", "head.lease.1"])
def test_a_head_whose_folder_is_not_there_yet_is_started_again(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 73 says that another head serves: systemd does not start a head again after it."""
    mount = tmp_path / "mount"
    monkeypatch.setenv("FALLOW_STATE_DIR", str(mount / "state"))
    monkeypatch.setenv("FALLOW_SLURM__CLIENT", "none")
    if missing == "state":
        mount.write_text("")
    else:
        (private_dir(mount / "state") / missing).mkdir()
    with pytest.raises(FallowError) as caught:
        main()
    assert caught.value.message.startswith(str(mount / "state"))
    assert caught.value.code is Exit.TEMPFAIL


def test_a_log_on_a_full_disk_costs_its_lines_only() -> None:
    code = """
import structlog
from fallow.head.main import set_up_logging
set_up_logging()
structlog.get_logger("test").warning("something")
print("goes on", flush=True)
"""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=180, check=False
        )
    assert done.stdout == b"goes on\n"


def test_a_head_may_open_as_many_files_as_the_site_lets_it() -> None:
    """With the usual 1024 a stranger who opens as many connections keeps it from opening any file."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(FILES, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
