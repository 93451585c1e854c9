"""Scripts without a head: what ends them ends them in order, and ranks that do not fit together are told so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from test_local import PLAIN, TINY, Box, box, wait  # noqa: F401

from fallow.model import Exit

TELLING = """
import torch, fallow
from torch.utils.data import DataLoader, TensorDataset
run = fallow.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, num_workers=2)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for update in run.updates(loader, epochs=10**6):
    for (x,) in update:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(update.step, flush=True)
"""


def test_ctrl_c_in_the_loop_of_a_plain_script(box: Box) -> None:  # noqa: F811
    """To the whole process group, as a terminal sends it: script and loader processes end, with one traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING],
        cwd=box.folder,
        env=box.environ | PLAIN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    box.started.append(process)
    assert process.stdout is not None
    for step in range(30):
        assert int(process.stdout.readline()) == step
    assert len(box.processes()) == 3
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGINT, "a shell calls that 130"
    # A loader process that was just handing a batch over tells of it, in a thread of Python's own, perhaps at the end.
    foreign = stderr.count("in _serve\n")
    assert stderr.count("Traceback") - foreign == stderr.count("KeyboardInterrupt") == 1, stderr
    assert foreign or stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    wait(box.nothing_left, 10.0)


UNLIKE = """
import os, torch, fallow
from torch.utils.data import DataLoader, TensorDataset
run = fallow.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer, reproducible=True)
data = TensorDataset(torch.ones(16, 64))
loaders = [run.prepare(DataLoader(data, batch_size), global_batch=8) for batch_size in (4, 4 >> run.rank)]
for loader in loaders:
    for update in run.updates(loader):
        for (x,) in update:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def unlike_ranks(box: Box, *options: str) -> list[subprocess.Popen[str]]:  # noqa: F811
    """Two, of which the second computes as an older processor would."""
    return box.ranks(2, TINY, *options, last={"ATEN_CPU_CAPABILITY": "default"})


def test_ranks_whose_loops_cut_a_step_unlike_each_other_are_refused(box: Box) -> None:  # noqa: F811
    """In their second loop. gloo ended one process for it, and the other was told of a lost connection."""
    for process in box.ranks(2, "-c", UNLIKE):
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == Exit.DATA, stderr
        assert "fallow: rank 1 cuts a step into 4 shards of 2 samples, rank 0 into 2 of 4: give the " in stderr
        assert "Traceback" not in stderr


@pytest.mark.soak
def test_ranks_that_compute_other_bits_are_brought_together_now_and_then(box: Box) -> None:  # noqa: F811
    """Their optimizers' results differ in the last bit, which is nobody's mistake; it was taken for one."""
    first, second = unlike_ranks(box, "--steps", "40", "--float32", "--pace", "0")
    told = "generation 0: this member's weights were not those of the others at step"
    for process, times in ((first, 0), (second, 1)):
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stderr
        assert stderr.count(told) == times


def test_ranks_that_compute_other_bits_are_refused_in_a_reproducible_world(box: Box) -> None:  # noqa: F811
    for process in unlike_ranks(box, "--steps", "20", "--reproducible"):
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == Exit.DATA, stderr
        assert "fallow: rank 1 does not fit to rank 0: the run is reproducible" in stderr
        assert "it computes with DEFAULT kernels, the members with " in stderr
        assert "Traceback" not in stderr
