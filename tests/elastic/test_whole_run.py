"""What becomes of a run without members, without room on its disk, and of one that is ended as a whole."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from elastic_rig import MakeRig, send

from fallow.model import EventRecord, Exit, RunStatus
from lacking import lacks
from waiting import gone, until


async def test_s11_a_stream_goes_on_from_its_checkpoint_when_all_were_lost(make_rig: MakeRig) -> None:
    """In the middle of an epoch; those who come read their way there, and no sample is used twice in what counts."""
    options = ("--stream", "--steps", 60)
    async with make_rig() as rig:
        run = await rig.run(*options)
        gate = run.hold("n0", 12)
        await run.begin(2)
        await run.held("n0", 12)
        await rig.call("checkpoint", run=run.id)
        gate.unlink()
        view = await run.until(lambda view: bool(view.checkpoints), "no checkpoint is written")
        saved = view.checkpoints[0].step
        await run.reaches(saved + 3)
        await run.kill_at_once("n0", "n1")
        await run.until(lambda view: view.status is RunStatus.SUSPENDED, "losing all does not suspend it")
        await run.absorb(3)
        report = await run.judged()
    assert [g.first_step for g in report.generations] == [0, saved]


async def test_s26_h3_r1_all_nodes_and_the_head_are_lost_at_once(make_rig: MakeRig) -> None:
    """As without power: the run goes on from the newest checkpoint, of which one follows the other."""
    async with make_rig(checkpoint__interval_s=1.0, membership__lease_s=8) as rig:
        run = await (await rig.run("--pace", 0.04)).begin(2)
        for _ in range(3):
            await run.saves()
        await rig.kill_head()
        for pid in (*run.agent_of.values(), *run.pids.values()):
            send(pid, signal.SIGKILL)
        await until(lambda: all(map(gone, run.pids.values())), "a worker lives")
        newest = max(run.saved())
        await rig.start_head()
        await run.until(lambda view: view.status is RunStatus.SUSPENDED, "nobody is missed")
        await run.absorb(2)
        report = await run.judged()
    assert [g.first_step for g in report.generations] == [0, newest]


async def test_h12_s12_a_suspended_run_is_rolled_back_and_goes_on_from_there(make_rig: MakeRig) -> None:
    """Nobody is there who could hear of it; whoever comes loads the older checkpoint, not the newest."""
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60)).begin(2)
        await run.reaches(8)
        await rig.call("checkpoint", run=run.id)
        view = await run.until(lambda view: bool(view.checkpoints), "no checkpoint is written")
        older = view.checkpoints[0].step
        await run.reaches(older + 5)
        await run.release("n1")
        await run.becomes(["n0"])
        await run.release("n0")
        view = await run.until(lambda view: view.status is RunStatus.SUSPENDED, "the last member does not leave")
        newest = max(one.step for one in view.checkpoints)
        assert newest > older
        await rig.call("rollback", run=run.id, step=older)
        view = await run.view()
        assert (view.status, view.change) == (RunStatus.SUSPENDED, None)
        await run.absorb()
        report = await run.judged(backs=1)
    assert [g.kind for g in report.generations] == ["start", "release", "start"]
    assert report.generations[-1].first_step == older
    assert [(back.from_step, back.to_step) for back in report.rolled_back] == [(newest, older)]


async def test_s10_a_signal_to_every_process_at_once_suspends_the_run_in_order(make_rig: MakeRig) -> None:
    """As scancel and preemption do it: SIGTERM to agents and workers alike. Nothing is lost and nobody is left.

    The last worker has a shell in front of it, which dies of the signal at once.
    """
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60)).begin(2)
        run.command = ["sh", "-c", '"$@"; exit $?', "sh", *run.command]
        await run.absorb()
        await run.reaches(5)
        for worker in ("n0", "n1", "n2"):
            agent = run.agent_of[worker]
            for process in [*psutil.Process(agent).children(recursive=True), psutil.Process(agent)]:
                process.send_signal(signal.SIGTERM)
        view = await run.until(lambda view: view.status is RunStatus.SUSPENDED, "it goes on")
        assert {await rig.agent_ends(agent) for agent in run.agent_of.values()} == {Exit.NO_RESTART}
        await until(lambda: all(map(gone, run.pids.values())), "a worker is left")
        (left,) = view.checkpoints
        assert "Traceback" not in "".join(run.log(worker) for worker in ("n0", "n1", "n2"))
        await run.absorb()
        report = await run.judged()
    # One may have been warned a step before the others.
    assert report.generations[-1].first_step == left.step
    assert "eject" not in [g.kind for g in report.generations]
    assert report.steps_discarded == 0


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

        def by(*members: str, words: str) -> Callable[[list[EventRecord]], bool]:
            return lambda events: {event.data["member"] for event in events if words in event.text} == {*members}

        with small_disk(run.folder):
            await run.begin(3)
            await run.reaches(3)
            filler = fill(run.folder)
            await rig.call("checkpoint", run=run.id)
            await run.told("ledger", by("n0", "n1", "n2", words="cannot write down"))
            (failed,) = await run.told("checkpoint")
            assert failed.data["failed"]
            assert "No space left on device; make room on the file system of" in failed.text
            await run.goes_on(2)
            run.kill("n2")
            await run.becomes(["n0", "n1"])
            await run.goes_on(2)
            assert {event.kind for event in await run.events()}.isdisjoint({"failed", "lost"})
            filler.unlink()
            await run.told("ledger", by("n0", "n1", words="writes down again"))
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
