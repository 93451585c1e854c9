"""`fallow export`: plain torch gets what was prepared, bit for bit, and no file is replaced or left half written."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own abbreviation)

import views
from command_line import Fallow
from fallow.cli import export
from fallow.core.membership.messages import Checkpoint, Problem
from fallow.model import CheckpointState, CheckpointView, Exit, FallowError
from fallow.worker.checkpoint.parts import take
from fallow.worker.checkpoint.writer import Writing
from fallow.worker.handover.snapshot import export_state
from fallow.worker.prepared.modes import read_extra
from fallow.worker.prepared.objects import Prepared
from small_training import Scaled

DEADLINE_S = 120.0


class Tied(nn.Module):
    """Tied weights, bfloat16, batch norm, a buffer that is no part of the state, extra state."""

    def __init__(self, scales: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = Scaled(5, torch.zeros(2) if scales is None else scales)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(5, 5).tril(), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.head(self.norm(self.inner(self.embedding(rows)))), self.gain.float().sum())


class Script:
    """What a script prepares: a model, its optimizer and schedule, an average, a dict."""

    def __init__(self, seed: int, scales: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = Tied(scales)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.notes: dict[str, Any] = {"best": None, "mean": torch.zeros(2)}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            F.cross_entropy(self.model(torch.arange(7)), torch.arange(7)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.average.update_parameters(self.model)
            self.notes["mean"] += 1

    def objects(self) -> list[Any]:
        return [self.model, self.optimizer, self.schedule, self.average, self.notes]

    def visible_state(self) -> list[Any]:
        return [*(thing.state_dict() for thing in self.objects()[:-1]), self.notes]


def write(folder: Path, step: int, *objects: Any) -> Path:
    """Let two members write a checkpoint; returns its folder."""
    prepared, reports = Prepared(), list[Checkpoint | Problem]()
    for thing in objects:
        prepared.add(thing)
    about: dict[str, Any] = {"generation": 1, "step": step, "epoch": 2, "by_hand": False, "written_at": 5.0}
    about |= {"modes": [], "names": prepared.names(), "extra": read_extra(prepared.modules)}
    tree = export_state(prepared, {"step": step}, modes=())
    members = [Writing(folder, take(tree, rank, 2, **about), reports.append) for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join(DEADLINE_S)
    (report,) = reports
    assert isinstance(report, Checkpoint)
    return Path(report.path)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own index, whose imports take seconds, is not needed, and a preempted node leaves none."""
    monkeypatch.setattr("fallow.worker.checkpoint.writer.write_index", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of checkpoints of steps 6 and 7, each of a model whose only weight is the step."""
    monkeypatch.chdir(tmp_path)
    for step in (6, 7):
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, step)
        write(tmp_path / "checkpoints", step, module)
    return tmp_path / "checkpoints"


def test_plain_torch_trains_on_from_the_file(tmp_path: Path, fallow: Fallow) -> None:
    script, plain = Script(1), Script(2)
    script.train(3)
    script.model.inner.scales = torch.rand(2)
    result = fallow("export", str(write(tmp_path / "c", 3, *script.objects())), str(tmp_path / "out.pt"), "--json")
    assert (result.code, result.json["step"], result.json["note"]) == (Exit.OK, 3, ""), result.err
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert state.keys() == {"step", "epoch", "model", "optimizer", "others", "dicts"}
    assert (state["step"], state["epoch"]) == (3, 2)
    plain.model.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(state["optimizer"])
    plain.schedule.load_state_dict(state["others"][0])
    plain.average.load_state_dict(state["others"][1])
    plain.notes = state["dicts"][0]
    for _ in range(2):
        assert all(map(same, plain.visible_state(), script.visible_state()))
        script.train(2)
        plain.train(2)


def test_safetensors_loads_the_model_with_its_tied_weights(tmp_path: Path, fallow: Fallow) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    script, plain = Script(1), Script(2)
    script.train(2)
    script.model.inner.scales = torch.rand(2)
    file = tmp_path / "out.safetensors"
    assert fallow("export", str(write(tmp_path / "c", 2, *script.objects())), str(file)).code == Exit.OK
    safetensors.load_model(plain.model, file)
    assert same(plain.model.state_dict(), script.model.state_dict())
    assert plain.model.head.weight is plain.model.embedding.weight
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert file.stat().st_mode == _mode_of_a_new_file(tmp_path)


def _mode_of_a_new_file(folder: Path) -> int:
    (folder / "new").touch()
    return (folder / "new").stat().st_mode


def test_several_models_and_optimizers(tmp_path: Path, fallow: Fallow) -> None:
    models = [nn.Linear(2, 2), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 + n) for n, model in enumerate(models)]
    checkpoint = write(tmp_path / "c", 0, *models, *optimizers)
    assert fallow("export", str(checkpoint), str(tmp_path / "out.pth")).code == Exit.OK
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    assert all(map(same, state["models"], [model.state_dict() for model in models]))
    assert state["optimizers"] == [optimizer.state_dict() for optimizer in optimizers]
    safetensors = pytest.importorskip("safetensors.torch")
    assert fallow("export", str(checkpoint), str(tmp_path / "out.safetensors")).code == Exit.OK
    expected = {f"{n}.{key}": value for n, model in enumerate(models) for key, value in model.state_dict().items()}
    assert same(safetensors.load_file(tmp_path / "out.safetensors"), expected)


def test_what_a_format_cannot_hold_is_said(tmp_path: Path, fallow: Fallow) -> None:
    checkpoint = write(tmp_path / "c", 1, Tied({"amax": 3}), {"loss": np.float64(2.0)})
    result = fallow("export", str(checkpoint), str(tmp_path / "out.pt"))
    assert "note: torch.load needs weights_only=False" in result.out and "numpy" in result.out
    state = torch.load(tmp_path / "out.pt", weights_only=False)
    assert (state["model"]["inner._extra_state"], state["dicts"]) == ({"amax": 3}, [{"loss": 2.0}])
    pytest.importorskip("safetensors")
    result = fallow("export", str(checkpoint), str(tmp_path / "out.safetensors"))
    assert "note: left out, because safetensors holds tensors only: inner._extra_state" in result.out


def _view(path: Path, step: int, state: CheckpointState) -> CheckpointView:
    return CheckpointView(
        step=step, generation=1, epoch=0, written_at=0.0, nbytes=1, path=str(path), state=state, asked=False
    )


@pytest.mark.parametrize("source", ["a run", "./checkpoints"])
@pytest.mark.parametrize(("options", "step"), [((), 7), (("--step", "6"), 6)])
def test_the_newest_or_the_chosen_step(
    source: str, options: tuple[str, ...], step: int, folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_8 = folder / "g00000001-s000000000008"
    checkpoints = [
        _view(path_8, 8, CheckpointState.ASIDE),
        *(_view(path_8.with_name(f"g00000001-s00000000000{at}"), at, CheckpointState.USABLE) for at in (7, 6)),
    ]
    snapshot = views.snapshot(views.run(checkpoints=checkpoints))
    monkeypatch.setattr(export, "ask", lambda method, kind, run: snapshot)
    assert fallow("export", source, "out.pt", *options).code == Exit.OK
    state = torch.load("out.pt", weights_only=True)
    assert (state["step"], float(state["model"]["weight"])) == (step, step)


@pytest.mark.parametrize(
    ("harm", "words"), [(bytes.upper, "does not match its SHA-256"), (lambda data: data[:-1], "incomplete")]
)
def test_a_damaged_checkpoint_is_refused_and_others_are_named(
    harm: Callable[[bytes], bytes], words: str, folder: Path, fallow: Fallow
) -> None:
    (part,) = folder.glob("*7/__1_0.distcp")
    part.write_bytes(harm(part.read_bytes()))
    result = fallow("export", "./checkpoints", "out.pt")
    assert (result.code, sorted(folder.parent.iterdir())) == (Exit.DATA, [folder])
    assert all(text in result.err for text in (f"{part.parent.name} cannot be used: {part.name}", words, "--step: 6"))
    assert fallow("export", "./checkpoints", "out.pt", "--step", "6").code == Exit.OK


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["./checkpoints", "out.onnx"], Exit.USAGE, "must end in .pt, .pth or .safetensors"),
        (["./checkpoints", "old.pt"], Exit.CANTCREAT, "old.pt exists and is not replaced"),
        (["./checkpoints", "none/out.pt"], Exit.CANTCREAT, "none: No such file or directory; make the folder"),
        (["./checkpoints", "old.pt/out.pt"], Exit.CANTCREAT, "old.pt: Not a directory; it must be a folder"),
        (["./checkpoints", f"{'out' * 90}.pt"], Exit.IOERR, ".pt cannot be written: File name too long"),
        (["./checkpoints", "out.pt", "--step", "5"], Exit.NOINPUT, "no checkpoint of step 5; choose from --step: 7, 6"),
        (["./empty", "out.pt"], Exit.NOINPUT, "./empty: no checkpoint; name the folder checkpoints of a run"),
        (["./none", "out.pt"], Exit.NOINPUT, "./none: no such folder"),
        (["./old.pt", "out.pt"], Exit.NOINPUT, "./old.pt: no such folder"),
        (["train", "out.pt"], Exit.UNAVAILABLE, "give a folder instead of the run, with a / in it"),
    ],
)
def test_a_mistake_is_one_clear_line(
    words: list[str], code: Exit, message: str, folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALLOW_STATE_DIR", str(folder.parent / "state"))
    Path("old.pt").write_text("old")
    Path("empty").mkdir()
    result = fallow("export", *words)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert message in result.err
    assert (Path("old.pt").read_text(), sorted(Path().glob("*out*"))) == ("old", [])


def test_without_safetensors_the_remedy_is_named(folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    result = fallow("export", "./checkpoints", "out.safetensors")
    assert (result.code, "pip install 'fallow[torch,export]'" in result.err) == (Exit.UNAVAILABLE, True)


def test_a_full_disk_leaves_nothing(folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state: Any, file: Any) -> None:
        file.write(b"half")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 4 vs 2")  # noqa: B904 (as torch does)

    monkeypatch.setattr(torch, "save", save)
    result = fallow("export", "./checkpoints", "out.pt")
    assert (result.code, result.err) == (Exit.IOERR, "fallow: out.pt cannot be written: No space left on device\n")
    assert list(folder.parent.iterdir()) == [folder]


def test_a_file_that_appears_meanwhile_stays(folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state: Any, file: Any) -> None:
        Path("out.pt").write_text("other")
        plain(state, file)

    plain = torch.save
    monkeypatch.setattr(torch, "save", save)
    assert fallow("export", "./checkpoints", "out.pt").code == Exit.IOERR
    assert Path("out.pt").read_text() == "other"


def test_the_heads_refusal_is_passed_on(folder: Path, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> Any:
        raise FallowError("no run is called x", Exit.NOINPUT)

    monkeypatch.setattr(export, "ask", ask)
    result = fallow("export", "x", "out.pt")
    assert (result.code, result.err) == (Exit.NOINPUT, "fallow: no run is called x\n")
    Path("x").mkdir()
    assert (
        "no run is called x; or give a folder instead of the run, with a / in it" in fallow("export", "x", "a.pt").err
    )
