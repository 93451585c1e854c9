"""Texts of a script that are not Unicode, such as names of files in other encodings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.core.membership.messages import Unreadable
from fallow.core.protocol.workers import FromWorker, Status
from fallow.wire.codec import Decoder, encode
from fallow.worker.api.run import Run
from scripted_agent import Agent


def test_what_a_script_logs_and_how_it_fails_is_told_whatever_its_texts_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the run's folder
    agent = Agent()
    run = Run(agent.session, None)
    agent.order(is_main=True)
    run.log(**{"loss/caf\udce9": 1.0, "a\0b": 2.0, "n" * 10_000: 3.0})
    run._failed(
        1, "no file 'caf\udce9.txt'", "line\n\x1b[31mno file 'caf\udce9.txt'\x1b[0m\n", "OSError at caf\udce9.py:3"
    )
    told = Decoder[FromWorker](FromWorker).decode(encode(agent.status))
    assert isinstance(told, Status)
    assert list(told.progress.scalars) == ["loss/caf\\xe9", "a\\x00b", "n" * 199 + "…"]
    assert told.fault is not None
    assert told.fault.message == "no file 'caf\\xe9.txt'"
    assert told.fault.traceback == "line\nno file 'caf\\xe9.txt'\n"
    assert told.fault.signature == "OSError at caf\\xe9.py:3"


def test_a_message_that_is_not_unicode_cannot_be_sent() -> None:
    with pytest.raises(Unreadable, match="Status cannot be sent"):
        encode(Status(break_reason="caf\udce9"))


def test_a_worker_goes_on_to_speak_after_a_status_that_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(beat_s=0.02)
    send, refused = agent.send, list[object]()

    def refuse_once(message: FromWorker) -> None:
        if not refused:
            refused.append(message)
            raise Unreadable("Status cannot be sent")
        send(message)

    monkeypatch.setattr(agent, "send", refuse_once)
    agent.until(lambda _: bool(refused))
    beats = len(agent.statuses) + 2
    agent.until(lambda _: len(agent.statuses) >= beats)
    agent.session.close()
    assert "n0: Status cannot be sent" in capfd.readouterr().err
