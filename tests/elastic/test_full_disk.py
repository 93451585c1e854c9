"""A disk without room, a real one: the run's folder is a small file system of its own (which needs root)."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_rig import MakeRig, send, until

from fallow.model import RunStatus
from lacking import lacks


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Inside, what is in the folder lies on a disk of one megabyte."""
    before = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, before)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "fallow-test", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        lacks(f"no file system can be mounted here: {getattr(error, 'stderr', '') or error}")
    try:
        shutil.copytree(before, folder, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on it, until the file is gone."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_what_this_machine_lacks_fails_in_ci_and_is_left_out_elsewhere(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no network"):
        lacks("no network")


async def test_s14_a_full_disk_costs_records_and_checkpoints_and_no_training(make_rig: MakeRig) -> None:
    """Ledgers are written on when there is room again; what a member could not write before it died is unknown.

    A run that is suspended meanwhile loses what there is no room for, and says so, but nothing older.
    """
    async with make_rig() as rig:
        run = await rig.run()

        async def told(words: str) -> set[str]:
            return {event.data["member"] for event in await run.events("ledger") if words in event.text}

        with small_disk(run.folder):
            await run.begin(3)
            await run.reaches(3)
            filler = fill(run.folder)
            await rig.call("checkpoint", run=run.id)
            view = await run.view()
            while await told("cannot write down") != {"n0", "n1", "n2"}:
                view = await run.reaches(view.step + 1)
                assert view.step < 100, "nobody misses room"
            (failed,) = await run.events("checkpoint")
            assert failed.data["failed"]
            assert "No space left on device; make room on the file system of" in failed.text
            await run.goes_on(2)
            run.kill("n2")
            await run.becomes(["n0", "n1"])
            await run.goes_on(2)
            assert {event.kind for event in await run.events()}.isdisjoint({"failed", "lost"})
            filler.unlink()
            while await told("writes down again") != {"n0", "n1"}:
                view = await run.reaches(view.step + 1)
            await rig.call("checkpoint", run=run.id)
            view = await run.until(lambda view: bool(view.checkpoints), "with room there is no checkpoint either")
            await until(lambda: not list((run.folder / "checkpoints").glob("*.tmp")), "a rest is left behind")

            (saved,) = view.checkpoints
            await run.reaches(saved.step + 3)
            filler = fill(run.folder)
            for worker in ("n0", "n1"):
                send(run.agent_of[worker], signal.SIGTERM)
            view = await run.until(lambda view: view.status is RunStatus.SUSPENDED, "it goes on")
            assert view.checkpoints == [saved]
            (suspended,) = await run.events("suspend")
            assert suspended.text.endswith(f"; the run goes on from the checkpoint of step {saved.step}")
            filler.unlink()
            await run.arrive()
            await run.grow()
            await run.becomes(["n3"])
            report = await run.ends()
            assert rig.undisturbed is not None
            whole = await rig.undisturbed()
    assert (report.status, report.message) == (RunStatus.FINISHED, "")
    assert (report.steps, report.final_digest) == (whole.steps, whole.final_digest)
    # One of the last two may have been warned a step before the other.
    assert [g.first_step for g in report.generations if g.kind == "start"] == [0, saved.step]
    assert (report.samples.lost, report.samples.duplicated) == (0, 0)
    assert report.samples.unknown > 0
    assert report.samples.consumed + report.samples.unknown == whole.samples.consumed
