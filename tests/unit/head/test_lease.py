"""A second head is noticed by the lease file where locks are not shared between hosts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fallow.files import Paths
from fallow.head.state.lease import BEAT_S, VALID_S, WATCH_S, Lease, own_files
from fallow.model import Exit, FallowError


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
        own_files(tmp_path)
        former.write(b" after")
    assert file.read_bytes() == b"before"
    assert [path.name for path in folder.iterdir()] == [file.name]
