"""Batch scripts: what the header says, and the copy that harvest jobs run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.script import harvest_copy, parse_script, split_directive, typed_settings, wrap
from fallow.model import Exit, FallowError

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 -t 10
# a remark
   # indented remark

#SBATCH --job-name="two words" # why
#FALLOW nodes=2:8 seed=7
#FALLOW --partitions=a,b
set -e
#SBATCH --time=99
fallow run -- python train.py
"""


def test_the_header_ends_at_the_first_command() -> None:
    script = parse_script(SCRIPT, "job.sh")
    assert [given.canonical for given in script.components[0]] == ["--nodes=2", "--time=10", "--job-name=two words"]
    assert script.interpreter == "/bin/bash"
    assert script.warnings == ("job.sh, line 10: #SBATCH after the first command (line 9) is not read",)


def test_fallow_lines() -> None:
    found = typed_settings(parse_script(SCRIPT, "job.sh").settings, "job.sh")
    assert (found.nodes, found.seed, found.partitions, found.workers_per_node) == ("2:8", 7, ("a", "b"), None)


def test_other_languages_have_headers_too() -> None:
    script = parse_script("#!/usr/bin/env python3\n#SBATCH -N2\nimport os\n", "t.py")
    assert script.interpreter == "/usr/bin/env python3"
    assert script.components[0][0].canonical == "--nodes=2"


def test_components_of_a_heterogeneous_job() -> None:
    text = "#!/bin/sh\n#SBATCH -N1 -C a\n#SBATCH hetjob\n#SBATCH -N2\n#SBATCH packjob -N3\nx\n"
    script = parse_script(text, "s")
    assert script.heterogeneous
    assert [[g.canonical for g in part] for part in script.components] == [
        ["--nodes=1", "--constraint=a"],
        ["--nodes=2"],
        ["--nodes=3"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("echo hi\n", "first line must be #!"),
        ("#!\n", "first line must be #!"),
        ("#!/bin/sh\r\necho\r\n", "DOS line ends"),
        ("#!/bin/sh\n\0", "NUL"),
        ("#!/bin/sh\n#SBATCH --nodse=2\n", r"s, line 2: .*did you mean --nodes\?"),
        ("#!/bin/sh\n#SBATCH nodes=2\n", "s, line 2: 'nodes=2' is no sbatch option"),
        ("#!/bin/sh\n#SBATCH -J 'a\n", "s, line 2: the quote ' is not closed"),
        ("#!/bin/sh\n#SBATCH --nodes=1:4\n", "write `#FALLOW nodes=1:4`"),
        ("#!/bin/sh\n#SBATCH --dry-run\n", "write a #FALLOW line"),
        ("#!/bin/sh\n\n#FALLOW node=1:4\n", r"s, line 3: #FALLOW has no key 'node'; did you mean nodes\?"),
        ("#!/bin/sh\n#FALLOW zzz=1\n", "known are nodes"),
        ("#!/bin/sh\n#FALLOW seed\n", "needs a value: seed=N"),
        ("#!/bin/sh\n#FALLOW seed=x\n", "whole number"),
        ("#!/bin/sh\n#FALLOW harvest-account=--wrap=x\n", "no name of an account"),
        ("#!/bin/sh\n#FALLOW workers-per-node=0\n", "whole number from 1"),
        ("#!/bin/sh\n#FALLOW budget-node-hours=-1\n", "above 0"),
        ("#!/bin/sh\n#FALLOW budget-node-hours=nan\n", "above 0"),
        ("#!/bin/sh\n#FALLOW nodes=4:1\n", "minimum is above the maximum"),
    ],
)
def test_says_what_is_wrong_and_where(text: str, message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        parse_script(text, "s")
    assert caught.value.code in (Exit.DATA, Exit.USAGE)


def test_the_harvest_copy_keeps_its_line_numbers() -> None:
    lines, copy = SCRIPT.split("\n"), harvest_copy(SCRIPT).split("\n")
    assert len(copy) == len(lines)
    assert [n for n, (a, b) in enumerate(zip(lines, copy, strict=True), 1) if a != b] == [2, 6]
    assert copy[1] == copy[5] == ""


LINES = st.sampled_from(
    ["#SBATCH -N2", "# x", "", "#FALLOW seed=1", "echo", "#SLURM -N1", "#SBATCH hetjob", " #SBATCH -N9"]
)


@given(st.lists(LINES))
def test_no_directive_is_left_in_a_harvest_copy(lines: list[str]) -> None:
    copy = harvest_copy("\n".join(["#!/bin/sh", *lines]))
    assert [list(part) for part in parse_script(copy, "s").components] == [[]]
    assert harvest_copy(copy) == copy
    assert [line for line in copy.split("\n") if line == "echo"] == [line for line in lines if line == "echo"]


def test_wrapping_as_sbatch_does() -> None:
    assert wrap("echo hi") == "#!/bin/sh\n# This script was created by sbatch --wrap.\n\necho hi\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" -J a b", ["-J", "a", "b"]),
        (' --comment="a # b" c#d', ["--comment=a # b", "c"]),
        (r" a\ b \#c", ["a b", "#c"]),
        (" '' x", ["", "x"]),
        ("", []),
    ],
)
def test_directives_are_split_as_sbatch_splits_them(text: str, words: list[str]) -> None:
    assert split_directive(text, "s") == words
