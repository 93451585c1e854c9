"""A script with nanoGPT's habits: few lines make it elastic, and its log and its result do not show the membership."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

sys.path.insert(0, str(Path(__file__).parent))
import torch
from test_local import PLAIN, RUN_S, Box, box

__all__ = ["box"]

HERE = Path(__file__).parent
CLOSE = 3e-5
"""Of float32 weights after 40 steps of AdamW, where sums come in another order."""


class Trained(NamedTuple):
    """What came out."""

    log: list[str]
    "lines, sorted: two agents write to one output, so their order may change where one takes over from the other"
    saved: Any

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.saved["model"], **{f"ema {name}": mean for name, mean in self.saved["state"]["ema"].items()}}


def trained(output: str, file: Path) -> Trained:
    said = sorted(line for line in output.splitlines() if line.startswith(("iter ", "step ", "saved ")))
    return Trained(said, torch.load(file, weights_only=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """The script in one process, without a head; `kind`: float or reproducible."""

    @cache
    def train(kind: str) -> Trained:
        file = tmp_path_factory.mktemp("alone") / "model.pt"
        words = [sys.executable, str(HERE / "nano_fallow.py"), str(file)]
        environ = os.environ | PLAIN | {"FALLOW_REPRODUCIBLE": str(int(kind == "reproducible"))}
        done = subprocess.run(words, check=True, timeout=RUN_S, capture_output=True, text=True, env=environ)
        return trained(done.stdout, file)

    return train


def test_eight_lines_make_it_elastic() -> None:
    texts = [(HERE / f"nano_{name}.py").read_text().split('"""', 2)[2] for name in ("plain", "fallow")]
    plain, elastic = ([line for line in text.splitlines() if line] for text in texts)
    changed = difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes()
    lines = [max(end - first, last - begin) for kind, first, end, begin, last in changed if kind != "equal"]
    assert 0 < sum(lines) <= 8


@pytest.mark.soak
def test_the_plain_script_runs(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    words = [sys.executable, str(HERE / "nano_plain.py"), str(file)]
    done = subprocess.run(words, check=True, timeout=RUN_S, capture_output=True, text=True)
    assert len(trained(done.stdout, file).log) == 15


@pytest.mark.parametrize("kind", ["float", "reproducible"])
def test_each_line_once_and_one_result_through_absorb_release_and_kill(
    kind: str, box: Box, alone: Callable[[str], Trained]
) -> None:
    file = box.folder / "model.pt"
    words = [str(HERE / "nano_history.py"), "28", str(file), "0.05"]
    reproducible = {"FALLOW_REPRODUCIBLE": "1"} if kind == "reproducible" else {}
    process = box.local(*words, members=2, schedule="+1@6,-m0@16", **reproducible)
    done = box.finish(process).trained(40, 240)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"], ["n2"]]
    ours, wanted = trained(done.stderr, file), alone(kind)
    assert len(wanted.log) == 15
    assert ours.saved["state"]["tokens"] == wanted.saved["state"]["tokens"]
    assert ours.saved["scale"] == wanted.saved["scale"]
    if kind == "reproducible":
        assert ours.log == wanted.log
        for name, tensor in wanted.tensors.items():
            assert torch.equal(ours.tensors[name], tensor), name
    else:
        assert [line.split(":")[0] for line in ours.log] == [line.split(":")[0] for line in wanted.log]
        for name, tensor in wanted.tensors.items():
            torch.testing.assert_close(ours.tensors[name], tensor, rtol=0, atol=CLOSE, msg=name)
