"""Batch scripts: what the header says, and how harvest jobs run them."""

import os
import subprocess
from pathlib import Path

import pytest

from fallow.core.submission.script import harvest_script, parse_script, split_directive, with_directives
from fallow.model import Exit, FallowError

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 -t 10
# a remark
   # indented remark

#SBATCH --job-name="two words" # why
#FALLOW nodes=2:8 seed=7 outlive-base
#FALLOW --partitions=a,b
#SBATCH hetjob
#SBATCH -N3
#SBATCH packjob
#SBATCH -C a
set -e
#SBATCH --time=99
fallow run -- python train.py
"""


def test_the_header_of_a_script_ends_at_the_first_command() -> None:
    script = parse_script(SCRIPT, "job.sh")
    assert [[given.canonical for given in part] for part in script.components] == [
        ["--nodes=2", "--time=10", "--job-name=two words"],
        ["--nodes=3"],
        ["--constraint=a"],
    ]
    assert script.settings == {"nodes": "2:8", "seed": 7, "outlive-base": True, "partitions": ["a", "b"]}
    assert script.warnings == ("job.sh, line 14: #SBATCH after the first command (line 13) is ignored",)
    python = parse_script("#!/usr/bin/env python3\n#SBATCH -N2\nimport os\n", "t.py")
    assert python.components[0][0].canonical == "--nodes=2" and not python.settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("#!/bin/sh\r\necho\r\n", "DOS line ends"),
        ("#!/bin/sh\n\0", "NUL"),
        ("\ufeff#!/bin/sh\n", "byte order mark"),
        ("#!/bin/sh\n#SBATCH --nodse=2\n", r"s, line 2: .*did you mean --nodes\?"),
        ("#!/bin/sh\n#SBATCH -J 'a\n", "s, line 2: the quote ' is not closed"),
        ("#!/bin/sh\n#SBATCH hetjob -N2\n", "s, line 2: sbatch ignores options after hetjob"),
        ("#!/bin/sh\n#SBATCH --nodes=1:4\n", "write `#FALLOW nodes=1:4`"),
        ("#!/bin/sh\n\n#FALLOW node=1:4\n", r"s, line 3: #FALLOW has no key 'node'; did you mean nodes\?"),
        ("#!/bin/sh\n#FALLOW outlive-base=yes\n", "line 2: #FALLOW outlive-base takes no value"),
        ("#!/bin/sh\n#FALLOW harvest-account=--wrap=x\n", "not an account name"),
        ("#!/bin/sh\n#FALLOW budget-node-hours=nan\n", "above 0"),
        (f"#!/bin/sh\n#FALLOW seed={'9' * 5000}\n", "at most 9223372036854775807"),
        ("#!/bin/sh\n#FALLOW min-minutes=10000001\n", "at most 10000000"),
        ("#!/bin/sh\n#FALLOW weight=2e9\n", "at most 1000000000"),
        ("#!/bin/sh\n#FALLOW nodes=0:4\n", "s, line 2: #FALLOW nodes=0:4: .*, e.g. nodes=1:4"),
        (f"#!/bin/sh\n#FALLOW nodes=1:{'9' * 5000}\n", "more than 65536 nodes"),
        ("#!/bin/sh\n#FALLOW deadline=soon\n", "s, line 2: #FALLOW deadline=soon: must be"),
    ],
)
def test_says_what_is_wrong_and_where(text: str, message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        parse_script(text, "s")
    usage = any(word in text for word in ("--nodse", " nodes=", "deadline="))
    assert caught.value.code is (Exit.USAGE if usage else Exit.DATA)


def test_a_base_job_that_is_submitted_again_is_told_by_its_options_alone() -> None:
    again = with_directives(SCRIPT, ())
    assert len(again.split("\n")) == len(SCRIPT.split("\n"))
    script = parse_script(again, "job.sh")
    assert (script.components, script.settings) == (((),), parse_script(SCRIPT, "job.sh").settings)
    assert again.endswith("set -e\n#SBATCH --time=99\nfallow run -- python train.py\n")


def run_as_harvest_job(folder: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script as harvest jobs of run `r` do."""
    stored = folder / "runs" / "r" / "script"
    stored.parent.mkdir(parents=True)
    stored.write_text(script)
    job = folder / "job"
    job.write_text(harvest_script(script))
    job.chmod(0o700)
    environ = {**os.environ, "FALLOW_STATE_DIR": str(folder), "FALLOW_RUN": "r"}
    return subprocess.run([job, *args], env=environ, capture_output=True, text=True, timeout=180, check=False)


def test_a_harvest_job_runs_the_batch_script_as_it_is(tmp_path: Path) -> None:
    script = '#!/bin/bash -e\n#SBATCH --nodes=2\necho $LINENO "$*" $-\necho told >&2\nexit 3\n'
    done = run_as_harvest_job(tmp_path, script, "an argument", "x")
    assert done.stdout.startswith("3 an argument x e")
    assert (done.returncode, done.stderr) == (3, "told\n")
    assert "#SBATCH" not in harvest_script(script)


@pytest.mark.parametrize("interpreter", ["/bin/bash", "/bin/sh", "/usr/bin/env python3"])
def test_a_harvest_job_that_ends_as_planned_succeeds(tmp_path: Path, interpreter: str) -> None:
    """`fallow run` kills the script and tells the shell around it. No trap of the script runs, and no line after it."""
    shell = "trap 'echo trapped' EXIT USR1 TERM\nkill -USR1 $FALLOW_BATCH_PID; kill -KILL $$\necho after\n"
    python = "import os\nos.kill(int(os.environ['FALLOW_BATCH_PID']), 10)\nos.kill(os.getpid(), 9)\nprint('after')\n"
    done = run_as_harvest_job(tmp_path, f"#!{interpreter}\n{python if 'python' in interpreter else shell}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" -J a b", ["-J", "a", "b"]),
        (' --comment="a # b" c#d', ["--comment=a # b", "c"]),
        (" a\\ b\\\tc \\#d", ["a b", "c", "#d"]),
        ('"a\\" b"\\', ['a" b']),
    ],
)
def test_directives_are_split_as_sbatch_splits_them(text: str, words: list[str]) -> None:
    assert split_directive(text, "s") == words
