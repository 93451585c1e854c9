"""Scripts without a head: what ends them ends them in order, and ranks that do not fit together are told so."""

import os
import signal
import subprocess
import sys

from local_rig import TINY, Box

from fallow.model import Exit
from waiting import wait_for

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


def test_ctrl_c_in_the_loop_of_a_plain_script(box: Box) -> None:
    """To the whole process group, as a terminal sends it: script and loader processes end, with one traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING],
        cwd=box.folder,
        env=box.environ | {"PUT_OFF_COMPILER": "1"},  # see `tests/start`
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
    wait_for("nothing is left", box.nothing_left)


def test_ranks_that_compute_other_bits_are_refused_in_a_reproducible_world(box: Box) -> None:
    """The second one computes as an older processor would."""
    words = (TINY, "--steps", "20", "--reproducible")
    for process in box.ranks(2, *words, last={"ATEN_CPU_CAPABILITY": "default"}):
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == Exit.DATA, stderr
        assert "fallow: rank 1 does not fit to rank 0: the run is reproducible" in stderr
        assert "it computes with DEFAULT kernels, the members with " in stderr
        assert "Traceback" not in stderr
