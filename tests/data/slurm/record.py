"""Writes down what the command line client gets from this host's Slurm for a cluster with all kinds of jobs:

    python tests/data/slurm/record.py tests/data/slurm/22.05

for `tests/unit/core/neighbour/test_recorded.py`, whenever `parse.JOB_FIELDS` or the commands
of `CliClient` change.
Names of users, hosts and folders are replaced.
"""

import asyncio
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from fallow.slurm import cli
from fallow.slurm.process import CommandResult
from fallow.testbed.cluster import Testbed

NONCE = "5ca1ab1e"
"In place of the one that is made anew for each poll."


def main(folder: Path) -> None:
    with Testbed.up(nodes=4) as testbed:
        submit_all(testbed)
        answers = asyncio.run(ask(testbed))
        for name, text in answers.items():
            (folder / f"{name}.txt").write_text(anonymous(text, testbed))


def submit_all(testbed: Testbed) -> None:
    """Jobs 1 to 12 (sweep's elements that run are 4 and 5, het is 6 and 7), a reservation, and a node being drained."""

    def submit(*options: str, script: str = "sleep 300") -> None:
        testbed.slurm("sbatch", "--output=/dev/null", *options, f"--wrap={script}")

    def states(state: str) -> int:
        return testbed.slurm("squeue", "-h", "-a", "-t", state, "-o", "%A").count("\n")

    def asked(field: str, job: int) -> str:
        return testbed.slurm("squeue", "-h", "-a", "-j", str(job), "-O", f"{field}:100").strip()

    submit("-J", "done", "-n1", "--mem=100", "-w", "n4", script="true")
    until(lambda: states("COMPLETED") == 1)
    harvest = ["-p", "scavenge", "--exclusive", "-w", "n1", "--gres=gpu:4", "--no-requeue", "--time=10"]
    submit("-J", "harvest", *harvest, "--comment=fallow:a1 tok=7", script="trap '' TERM; sleep 300")
    submit("-J", "sweep", "--array=0-5%2", "-n1", "--mem=100", "-w", "n2", "--time=5")
    until(lambda: states("RUNNING") == 3)
    component = ["-n1", "--gres=gpu:1", "--mem=500", "-w", "n3", "--time=20"]
    submit("-J", "het", *component, ":", "-N1", "--exclusive", "-w", "n4", "--time=20")
    until(lambda: states("RUNNING") == 5)
    submit("-J", "after", "--dependency=afterok:2", "--mem-per-cpu=100", "-c2", "--hold")
    later = ["-N2", "--gpus-per-node=2", "--exclude=n4", "--begin=now+1hour", "--time=5"]
    submit("-J", "later", *later, "--comment=two words | N/A")
    submit("-J", "tasks", "-N2", "-n3", "--gpus-per-task=1", "--hold", "--time=5")
    reservation = ["reservationname=maint", "starttime=now+2hour", "duration=60", "nodes=n[1-2]", "users=root"]
    testbed.slurm("scontrol", "create", "reservation", *reservation, "flags=maint,ignore_jobs")
    testbed.slurm("scontrol", "update", "nodename=n3", "state=drain", "reason=fan broken State=IDLE")
    submit("-J", "urgent", "-N1", "--exclusive", "-w", "n1", "--time=5")
    submit("-J", "big", "-N2", "--exclusive", "--exclude=n3", "--time=20")
    until(lambda: asked("PreemptTime", 2) != "N/A")  # the grace is 10 s: from here on in a hurry
    until(lambda: asked("SchedNodes", 11) == "n1" and asked("SchedNodes", 12).startswith("n"))


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not reached():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.2)


async def ask(testbed: Testbed) -> dict[str, str]:
    """Standard output of what `config` and `poll` start, by file name."""
    answers: dict[str, str] = {}

    async def keep(argv: list[str], **options: object) -> CommandResult:
        done = await real(argv, **options)
        name = "config" if argv[-1] == "config" else argv[0]
        if argv[0] != "sacctmgr":  # these clusters have no accounting
            answers[f"poll_{name}"] = done.stdout
        return done

    real = cli.run
    with mock.patch.object(cli, "run", keep), mock.patch.object(secrets, "token_hex", return_value=NONCE):
        client = cli.CliClient(testbed.conf)
        await client.config()
        await client.poll()
    return answers


def anonymous(text: str, testbed: Testbed) -> str:
    prefix = Path(shutil.which("scontrol") or "").resolve().parents[1]
    text = text.replace(str(testbed.folder), "/run/testbed")
    text = text if prefix == Path("/usr") else text.replace(str(prefix), "/opt/slurm")
    text = re.sub(r"\broot\b", "alice", text).replace(socket.gethostname(), "host")
    return re.sub(r"OS=Linux .*? (?=RealMemory)", "OS=Linux ", text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
