"""A script with nanoGPT's habits: neither what it prints nor what it saves shows who computed it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from local_rig import Box, Script
from talking_training import STEPS, Net

SCRIPT = str(Path(__file__).with_name("talking_training.py"))


def talk(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("TALK")]


@pytest.fixture(scope="module")
def alone(script: Script, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Any]:
    """What it prints and saves in one process, without a head."""
    file = tmp_path_factory.mktemp("alone") / "saved.pt"
    said = talk(script(SCRIPT, str(file)))
    assert len(said) == 2 * STEPS + 3
    return said, torch.load(file, weights_only=True)


def test_each_line_is_shown_once_whoever_is_main_and_what_it_saves_loads_without_fallow(
    box: Box, alone: tuple[list[str], Any]
) -> None:
    """Absorbed, rank 0 released, the next rank 0 killed, and an absorb again."""
    file = box.folder / "saved.pt"
    words = [SCRIPT, str(file), "--kill", "n1", "--pace", "0.05", "--hurry", str(box.hurry)]
    process = box.local(*words, schedule="+1@4,-m0@10,+1@30")
    done = box.ends_with("n2", "n3", process=process).trained(STEPS, 4 * STEPS)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"], ["n2"], ["n2", "n3"]]
    said, wanted = alone
    # Two agents write to one output: the order of their lines may change where one takes over from the other.
    assert sorted(talk(done.stderr)) == sorted(said)
    assert talk(done.stderr)[:3] == said[:3]
    saved: Any = torch.load(file, weights_only=True)
    torch.testing.assert_close(saved, wanted, rtol=0, atol=0)
    model = Net()
    model.load_state_dict(saved["model"], strict=True)
    torch.optim.AdamW(model.parameters(), lr=0.01).load_state_dict(saved["optimizer"])
    assert model.inner.scale["history"] == [STEPS - 1.0]


def test_a_script_for_one_process_is_changed_in_eight_lines(script: Script, tmp_path: Path) -> None:
    """It says and saves as much."""
    text = Path(SCRIPT).read_text()
    assert len(re.findall("# was:", text)) <= 8
    plain = tmp_path / "plain.py"
    plain.write_text(re.sub(r"^( *).*# was:(?: (.*))?$", r"\1\2", text, flags=re.MULTILINE))
    assert "fallow" not in plain.read_text()
    said = talk(script(str(plain), str(tmp_path / "saved.pt")))
    assert len(said) == 2 * STEPS + 3
    assert (tmp_path / "saved.pt").exists()


def test_in_a_fixed_world_rank_0_is_main_from_the_start(box: Box, alone: tuple[list[str], Any]) -> None:
    done = box.fixed(2, SCRIPT, str(box.folder / "saved.pt"))
    assert done.code == 0, done.stderr
    assert talk(done.stdout) == alone[0]
