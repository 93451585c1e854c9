"""Durable checkpoints without processes: cutting, writing by several members (threads here), reading, damage."""

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import builders
from fallow.core.membership.messages import Checkpoint, Problem
from fallow.model import FallowError
from fallow.worker.checkpoint import writer
from fallow.worker.checkpoint.manifest import PartInfo, complete_checkpoints, read_manifest
from fallow.worker.checkpoint.parts import PartSnapshot, take
from fallow.worker.checkpoint.restore import load, load_newest
from fallow.worker.checkpoint.writer import Writing
from fallow.worker.handover.snapshot import export_state, load_state
from fallow.worker.prepared.modes import read_extra
from fallow.worker.prepared.objects import Prepared
from small_training import Scaled

DEADLINE_S = 120.0
Report = Checkpoint | Problem


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "objects": {
            "models": [
                OrderedDict({"0.weight": torch.randn(33, 7), "0.bias": torch.randn(33), "one": torch.tensor(2)})
            ],
            "optimizers": [{"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(40, 2, 3)}}, "lr": 0.1}],
            "others": [{"empty": torch.empty(0, 4), "half": torch.randn(5).bfloat16(), "turned": torch.ones(4, 3).T}],
        },
        "position": {"step": 7, "loss": 0.5},
    }


ABOUT: dict[str, Any] = {"generation": 2, "step": 7, "epoch": 1, "by_hand": False, "written_at": 5.0}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def write(
    folder: Path,
    step: int,
    world: int,
    *,
    only: set[int] | None = None,
    modes: Sequence[list[str]] = (),
    **manifest_fields: Any,
) -> list[Report]:
    """Let `world` members (or `only` some of them) write a checkpoint at the same time; what they report.

    `modes`: of each.
    """
    reports: list[Report] = []
    members = []
    tree = manifest_fields.pop("tree", None) or state()
    for rank in sorted(range(world) if only is None else only):
        about = {**ABOUT, "step": step, "modes": modes[rank] if modes else [], **manifest_fields}
        member = Writing(folder, take(tree, rank, world, **about), reports.append)
        member.start()
        members.append(member)
    for member in members:
        member.hurry.set()
        member.join(DEADLINE_S)
        assert not member.is_alive()
    return reports


def written(folder: Path, step: int, world: int, **manifest_fields: Any) -> Path:
    """The folder of a checkpoint that `world` members have written."""
    (checkpoint,) = write(folder, step, world, **manifest_fields)
    return Path(checkpoint.path)


@pytest.mark.parametrize("world", [1, 8])
def test_what_several_members_wrote_comes_back_whole(tmp_path: Path, world: int) -> None:
    (checkpoint,) = write(tmp_path, 7, world, modes=[["frozen model.0.weight"]] * world)
    assert isinstance(checkpoint, Checkpoint), "one member finishes, nobody complains"
    folder = Path(checkpoint.path)
    assert list(tmp_path.iterdir()) == [folder] == complete_checkpoints(tmp_path)
    assert folder.name == "g00000002-s000000000007"
    assert same(load(folder), state() | {"modes": ["frozen model.0.weight"], "extra": {}})
    manifest, digest = read_manifest(folder)
    assert (manifest.step, manifest.epoch, manifest.world, digest) == (7, 1, world, checkpoint.digest)
    assert checkpoint.nbytes == sum(file.size for file in manifest.files)
    names = {".metadata", "manifest", "extra.distcp", *(f"__{rank}_0.distcp" for rank in range(world))}
    assert {path.name for path in folder.iterdir()} == names
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_nobody_waits_for_torchs_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first one may take longer than Slurm lets the last member live: the checkpoint counts without it."""

    def write_index(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_index", write_index)
    assert same(load(written(tmp_path, 7, 2)), state() | {"modes": [], "extra": {}})


def test_what_one_member_has_put_to_rest_does_not_hide_what_all_have_frozen(tmp_path: Path) -> None:
    """A member may evaluate and leave its model in `eval()`."""
    folder = written(tmp_path, 7, 2, modes=[["frozen a", "resting b"], ["frozen a"]])
    assert load(folder)["modes"] == ["frozen a", "unlike resting"]


class Tied(torch.nn.Module):
    """As a GPT: tied weights, a mask that is no part of the state, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.inner = Scaled(5, {"amax": torch.zeros(3), "steps": 0})
        self.same = self.inner
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.ones(5, 5).tril(), persistent=False)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "tensor rate": lambda groups: torch.optim.AdamW(
        [p for group in groups for p in group["params"]], lr=torch.tensor(0.1)
    ),
}


class Script:
    """A script in plain torch: a model, an optimizer with two groups, a scheduler, an average, and a dict."""

    def __init__(self, make: Any) -> None:
        torch.manual_seed(1)
        self.model = Tied()
        self.optimizer = make([{"params": [self.model.embedding.weight]}, {"params": [self.model.inner.weight]}])
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        first = torch.ones(2)
        self.counts: dict[str, Any] = {"best": None, "losses": [], "mean": torch.zeros(2), "kept": [first, first]}

    def train(self, steps: int) -> None:
        for step in range(steps):
            rows = self.model.inner(self.model.embedding(torch.arange(7)))
            self.model.head(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.plateau.step(1.0)
            self.average.update_parameters(self.model)
            self.counts["losses"].append(step)
            self.counts["mean"] += 1

    def prepared(self, *, compiled: bool = False) -> Prepared:
        prepared = Prepared()
        for thing in (
            torch.compile(self.model) if compiled else self.model,
            self.optimizer,
            self.schedule,
            self.plateau,
            self.average,
            self.counts,
        ):
            prepared.add(thing)
        return prepared

    def visible_state(self) -> list[Any]:
        state = self.optimizer.state_dict()
        return [self.model.state_dict(), state, self.schedule.state_dict(), self.average.state_dict(), self.counts]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_torch_trains_on_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Without Fallow: torch's own tools read the file, and every part is loaded by its own `load_state_dict`."""
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    script, plain, again = (Script(OPTIMIZERS[name]) for _ in range(3))
    script.train(3)
    script.model.inner.scales = {"amax": torch.rand(3), "steps": 41}
    prepared = script.prepared(compiled=name == "adamw")
    options = {"names": prepared.names(), "extra": read_extra(prepared.modules)}
    folder = written(tmp_path, 3, 3, tree=export_state(prepared, {"step": 3}, modes=()), **options)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    torch_state = torch.load(tmp_path / "whole.pt", weights_only=True)
    plain.model.load_state_dict(torch_state["models"][0], strict=True)
    plain.optimizer.load_state_dict(torch_state["optimizers"][0])
    for thing, saved in zip((plain.schedule, plain.plateau, plain.average), torch_state["others"], strict=True):
        thing.load_state_dict(saved)
    plain.counts = torch_state["dicts"][0]
    some = {"models.0.inner.weight": torch.zeros(5, 5)}
    torch.distributed.checkpoint.load(some, checkpoint_id=folder)
    assert torch.equal(some["models.0.inner.weight"], script.model.inner.weight)
    again.model.mask.zero_()
    assert load_state(again.prepared(), load(folder)) == {"step": 3}
    assert torch.equal(again.model.mask, script.model.mask), "it is no part of state_dict, but of the run's state"
    for one in (plain, again):
        assert same(one.visible_state(), script.visible_state())
    for one in (script, plain, again):
        one.train(2)
    for one in (plain, again):
        assert same(one.visible_state(), script.visible_state())


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "manifest"])
@pytest.mark.parametrize("harm", ["flip", "tear", "remove"])
def test_damage_is_found_and_named(tmp_path: Path, file: str, harm: str) -> None:
    path = written(tmp_path, 7, 2) / file
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "tear":
        path.write_bytes(data[:-10])
    else:
        path.unlink()
    with pytest.raises(FallowError, match=file):
        load(path.parent)


def test_a_damaged_one_is_passed_over_and_told_and_the_one_before_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, 6, 2)
    newest = written(tmp_path, 7, 2, tree=state() | {"position": {"step": 8}})
    part = newest / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    unusable: list[tuple[str, str]] = []
    paths = [str(path) for path in reversed(complete_checkpoints(tmp_path))]
    tree = load_newest(paths, lambda path, why: unusable.append((path, why)), lambda: None)
    assert tree["position"] == {"step": 7, "loss": 0.5}
    ((path, why),) = unusable
    assert path == str(newest) and "__0_0.distcp" in why
    with pytest.raises(FallowError, match="no older checkpoint is left"):
        load_newest(paths[:1], lambda *_: None, lambda: None)
    assert load_newest([], lambda *_: None, lambda: None) is None


def test_a_checkpoint_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, 7, 1)
    part = folder / "__0_0.distcp"
    part.chmod(0o666)
    with pytest.raises(FallowError, match="open to others"):
        load(folder)
    part.chmod(0o600)
    elsewhere = tmp_path / "elsewhere"
    part.rename(elsewhere)
    part.symlink_to(elsewhere)
    with pytest.raises(FallowError, match="__0_0"):
        load(folder)


def test_a_member_that_never_writes_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 6, 3)
    assert write(tmp_path, 7, 3, only={2}) == []
    with monkeypatch.context() as patch:
        patch.setattr(writer, "HURRY_S", 0.2)
        (failed,) = write(tmp_path, 7, 3, only={0})
    assert "rank" in failed.reason
    assert "ranks 1" in failed.reason
    assert [path.name[-3:] for path in tmp_path.iterdir()] == ["006"], "the older one alone is left"
    # Without the first member nobody gives it up: the next complete one sweeps it away.
    assert write(tmp_path, 8, 3, only={1, 2}) == []
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    write(tmp_path, 9, 2)
    assert sorted(path.name[-3:] for path in tmp_path.iterdir()) == ["006", "009"]


def test_a_part_that_grows_is_waited_for_though_a_member_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = builders.Clock(), threading.Semaphore(0)

    def look(seconds: float) -> None:
        looks.release()
        time.sleep(0.001)

    def grow(folder: Path, snapshot: PartSnapshot) -> PartInfo:
        for length in range(1, 12 if snapshot.rank == 1 else 1):
            (folder / "__1_0.distcp").write_bytes(bytes(length))
            while looks.acquire(blocking=False):
                pass
            for _ in range(2):  # from now on, the first member has seen it
                assert looks.acquire(timeout=DEADLINE_S)
            clock.now += 0.6 * writer.HURRY_S
        return write_part(folder, snapshot)

    write_part = writer.write_part
    monkeypatch.setattr(writer, "write_part", grow)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=clock, sleep=look))
    assert [type(report) for report in write(tmp_path, 7, 2)] == [Checkpoint]


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(errno.EDQUOT, "Disk quota exceeded"), "your quota"), (MemoryError(), "MemoryError")]
)
def test_what_one_member_cannot_write_is_said_once_and_no_rest_is_left(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = writer.write_part

    def write_part(folder: Path, snapshot: Any) -> Any:
        if snapshot.rank == 0:
            return plain(folder, snapshot)
        while not (folder / "part-00000.json").exists():
            time.sleep(0.001)
        raise error

    monkeypatch.setattr(writer, "write_part", write_part)
    (failed,) = write(tmp_path, 7, 2)
    assert said in failed.reason
    assert list(tmp_path.iterdir()) == []
