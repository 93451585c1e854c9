"""When the head is told of changes, and what an agent reads before it can talk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders import Clock
from fallow.agent.__main__ import read_soon
from fallow.agent.reporter import Reporter
from fallow.agent.silence import HeadSilence
from fallow.core.protocol import Beat, Progress
from fallow.model import Exit, FallowError, KeyFile
from waiting import until


async def test_many_changes_make_few_beats() -> None:
    sent = list[Beat]()
    warnings = [0]
    reporter = Reporter(lambda: Beat(warned=warnings[-1]), sent.append)
    reporter.note_change()
    for number in range(1, 200):
        warnings.append(number)
        reporter.note_change()
    await until(lambda: sent)
    assert [beat.warned for beat in sent] == [199]
    reporter.note_change()
    done = asyncio.get_running_loop().time() + 0.05
    await until(lambda: asyncio.get_running_loop().time() > done)
    assert len(sent) == 1, "nothing has changed"
    reporter.tell()
    assert len(sent) == 2


async def test_how_the_training_gets_on_travels_with_heartbeats_and_with_new_processes_alone() -> None:
    sent, stands = list[Beat](), [Beat(progress=Progress(shards=1))]
    reporter = Reporter(lambda: stands[-1], sent.append)
    reporter.tell()
    newer = Progress(shards=2, pids=(7,))
    for number, progress in enumerate((Progress(shards=2), newer), 1):
        stands.append(Beat(warned=number, progress=progress))
        reporter.note_change()
        await until(lambda number=number: sent[-1].warned == number)
    reporter.tell()
    assert [beat.progress for beat in sent] == [Progress(shards=1), Progress(), newer, newer]
    assert [beat.brief for beat in sent] == [False, True, False, False]


def test_an_agent_that_was_stopped_does_not_take_the_head_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("fallow.agent.silence.time", SimpleNamespace(monotonic=clock))
    silence = HeadSilence("n1")
    clock.now += 3.0
    assert silence.silent_s == 3.0
    clock.now += 600.0
    silence.was_stopped(599.0)
    assert silence.silent_s == 4.0
    silence.hear()
    silence.was_stopped(599.0)
    assert silence.silent_s == 0.0


def test_h11_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(FallowError, match="still missing") as caught:
        read_soon(tmp_path / "none.json", KeyFile, "", within_s=0.0)
    assert caught.value.code is Exit.NOINPUT
