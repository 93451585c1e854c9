"""sbatch's command line: split as sbatch does, and turned into our submissions."""

import shlex

import pytest

from fallow.core.holes import Part
from fallow.core.submission.prepare import Submission, plan
from fallow.core.submission.sbatch import (
    base_options,
    captured_environment,
    harvest_options,
    job_environment,
    script_options,
)
from fallow.core.submission.sbatch_line import CommandLine, in_force, parse_nodes, split
from fallow.core.submission.sbatch_table import BY_LONG, Reach
from fallow.core.submission.script import parse_script, with_directives
from fallow.model import AllocationKind, Exit, FallowError, RunSpec


def canonical(line: CommandLine) -> list[list[str]]:
    return [[given.canonical for given in part] for part in line.components]


def test_what_only_sbatch_reads_so_is_split_as_sbatch_does() -> None:
    for line, options, script, args in (
        (["--partit=x", "a.sh"], [["--partition=x"]], "a.sh", ()),
        (["-Hvv", "a.sh"], [["--hold", "--verbose", "--verbose"]], "a.sh", ()),
        (["-HN", "2", "a.sh"], [["--hold", "--nodes=2"]], "a.sh", ()),
        (["--nodes", "2", "a.sh"], [["--nodes=2"]], "a.sh", ()),
        (["--nice", "a.sh", "5"], [["--nice"]], "a.sh", ("5",)),
        (["a.sh", "-N2", "--", "x"], [[]], "a.sh", ("-N2", "--", "x")),
        (["-J", "-x", "a.sh"], [["--job-name=-x"]], "a.sh", ()),
    ):
        found = split(line)
        assert canonical(found) == options
        assert (found.script, found.args) == (script, args)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--nodse=2", "a.sh"], "did you mean --nodes?"),
        (["--workers-per-node=2", "a.sh"], "write --fallow=workers-per-node=2, or a line `#FALLOW workers-per-node=2`"),
        (["--worker-per-node", "2", "a.sh"], "write --fallow=workers-per-node=N,"),
        (["--weight=2", "a.sh"], "write --fallow=weight=2,"),
        (["--outlive-base", "a.sh"], "write --fallow=outlive-base,"),
        (["--ntasks-per=2"], "could be any of"),
        (["-Z", "a.sh"], "no option -Z"),
        (["-N", ":", "-N2", "a.sh"], "-N needs a value"),
        (["--hold=yes", "a.sh"], "takes no value"),
    ],
)
def test_says_what_is_wrong_with_an_option(line: list[str], message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        split(line)
    assert caught.value.code is Exit.USAGE


def test_nodes() -> None:
    assert (parse_nodes("1,4,8-16:4"), parse_nodes("1k"), parse_nodes("2-3")) == ((1, 16), (1024, 1024), (2, 3))
    wrong = {"4:1": "did you mean --nodes=1:4", "0:4": "at least one", "5-2": "minimum is above", ":4": "MIN:MAX"}
    for text, message in wrong.items():
        with pytest.raises(FallowError, match=message):
            parse_nodes(text)


def planned(argv: list[str], text: str = "#!/bin/sh\nfallow run -- x\n", **environ: str) -> Submission:
    return plan(split(argv), parse_script(text, "job.sh"), environ=environ, cwd="/home/u", umask=0o22, now=1.0)


def test_what_cannot_be_a_run_is_refused_with_advice() -> None:
    for option in ("array=1-3", "cluster=b", "clusters=b", "cluster-constraint=b", "external", "uid=1", "gid=1"):
        with pytest.raises(FallowError, match=rf"--{option.partition('=')[0]} cannot be used for a run: .+"):
            planned([f"--{option}", "job.sh"])
    for name, value in (("SBATCH_ARRAY_INX", "1-2"), ("SBATCH_CLUSTERS", "other"), ("SLURM_CLUSTERS", "other")):
        with pytest.raises(FallowError, match=r"--(array|clusters) cannot"):
            planned(["job.sh"], **{name: value})


def test_limits_of_the_run_and_size_of_the_base_job() -> None:
    for argv, header, limits, size in (
        (["--nodes=2:8"], "", (2, 8), "--nodes=2"),
        ([], "#FALLOW nodes=2:8", (2, 8), "--nodes=2"),
        ([], "#SBATCH -N4\n#FALLOW nodes=2:8", (2, 8), None),
        (["--nodes=1:3"], "#SBATCH -N4\n#FALLOW nodes=2:8", (1, 3), "--nodes=1"),
        (["--fallow=nodes=1:5"], "#FALLOW nodes=2:8", (1, 5), "--nodes=1"),
        (["-n8", "--ntasks-per-node=4"], "", (2, 2), None),
        ([], "#SBATCH -N8-16:4", (8, 16), None),
        (["-N4-8:4"], "#FALLOW nodes=2:9", (2, 9), "--nodes=4-8:4"),
        (["-N1", ":", "--nodes=2:5"], "", (3, 6), "--nodes=1"),
    ):
        made = planned([*argv, "job.sh"], f"#!/bin/sh\n{header}\nfallow run -- x\n")
        assert (made.spec.min_nodes, made.spec.max_nodes) == limits
        options = made.options("t", {})
        assert next((word for word in options if word.startswith("--nodes")), None) == size
        assert not any(word.startswith("--fallow") for word in options)


def test_a_base_job_that_leaves_no_room_to_grow_says_so_and_one_outside_of_the_limits_is_refused() -> None:
    assert any("--nodes=MIN:MAX" in warning for warning in planned(["-N2", "job.sh"]).warnings)
    assert not planned(["--nodes=1:2", "job.sh", "--dry", "-N1"]).warnings
    for late in ("--dry-run", "--nodes=1:4", "-N1:4", "--fallow=seed=1"):
        assert any(f"{late} after job.sh" in warning for warning in planned(["-N2", "job.sh", late]).warnings)
    with pytest.raises(FallowError, match="outside of #FALLOW nodes=2:4"):
        planned(["-N8", "job.sh"], "#!/bin/sh\n#FALLOW nodes=2:4\nx\n")


EXPORTED = job_environment("/state", "r1", "r1.0", AllocationKind.BASE)
OURS = f"--export={','.join(EXPORTED)}"
MARKED = "'--comment=x t' --no-requeue"


@pytest.mark.parametrize(
    ("line", "header", "first", "again"),
    [
        ("", "", "--comment=t --no-requeue", None),
        (
            "-J n --requeue -W --parsable",
            "",
            "--job-name=n --requeue --wait --comment=t",
            "--job-name=n --requeue --comment=t",
        ),
        ("--comment=x --export=ALL,A=1", "", f"{MARKED} --export=ALL,A=1", None),
        ("--comment=x --export=A,B=2", "", f"{MARKED} --export=A,B=2,{','.join(EXPORTED)}", None),
        (
            "--nodes=2:4 -d after:1 --export=NONE --comment=x",
            "",
            f"--nodes=2 --dependency=after:1 {MARKED} {OURS}",
            f"--nodes=2 {MARKED} {OURS}",
        ),
        ("-N1 --comment=x : -N2", "", f"--nodes=1 {MARKED} : --nodes=2 {MARKED}", None),
        (  # the first submission is the command line as it is; others know what sbatch read beside it
            "--container-mounts=/b --container-mounts=/c --site-cache=y --mail-user=u --mail-user=v",
            "--container-mounts=/a --site-cache=x --comment=x --no-requeue --export=NONE -t5",
            "--no-requeue --container-mounts=/b --container-mounts=/c --site-cache=y --mail-user=u --mail-user=v "
            f"'--comment=x t' {OURS}",
            "--container-mounts=/a --site-cache=y --no-requeue --time=5 --container-mounts=/b --container-mounts=/c "
            f"--mail-user=v '--comment=x t' {OURS}",
        ),
    ],
)
def test_the_base_job_is_the_users_own_with_the_token_in_its_comment_and_our_variables(
    line: str, header: str, first: str, again: str | None
) -> None:
    made = planned([*line.split(), "job.sh", "a"], f"#!/bin/sh\n#SBATCH {header}\nx\n")
    assert made.options("t", EXPORTED) == shlex.split(first)
    assert base_options(made.spec.sbatch_options, token="t", exported=EXPORTED) == shlex.split(again or first)


def spec(*options: str) -> RunSpec:
    return RunSpec(run="r1", name="n", min_nodes=1, max_nodes=2, cwd="/home/u", harvest_options=list(options))


def test_a_harvest_job_gives_way_and_is_findable() -> None:
    options = harvest_options(spec("--account=a", "--qos=q"), "r1.3", "low", 30, "/s/%j.log", 100_000)
    wanted = (
        "--export=ALL --propagate=NONE --ignore-pbs --nodes=1 --no-requeue --nice=100000 "
        "--mail-type=NONE --open-mode=append --output=/s/%j.log --chdir=/home/u --job-name=r1.3 "
        "'--comment=r1.3 harvest' --time=30 --partition=low --account=a --qos=q"
    )
    assert set(shlex.split(wanted)) <= set(options)
    made = harvest_options(spec("--account=a", "--qos=q"), "t", "low", 30, "o", 1, qos="idle", account="spare")
    assert sorted(word for word in made if word.startswith(("--account", "--qos"))) == ["--account=spare", "--qos=idle"]


def test_what_would_be_read_as_something_else_is_refused() -> None:
    for token, partition, minutes in (("--wrap=x", "p", 5), ("a\nb", "p", 5), ("t", "-p", 5), ("t", "p", 0)):
        with pytest.raises(FallowError):
            harvest_options(spec(), token, partition, minutes, "o", 1)


def test_what_kind_of_node_reaches_harvest_jobs_and_what_meant_the_base_job_does_not() -> None:
    made = planned(
        shlex.split(
            "-A acc -C v100 --gres=gpu:4 -c8 -x n1 -w n2 -d afterok:1 -b now -L lic -t 60 -o o -e e -J name "
            "--reservation=r --signal=B:USR1@60 --hold --mail-user=u --mem-per-cpu=1G -n4 --begin=now job.sh"
        )
    )
    assert " ".join(made.spec.harvest_options) == (
        "--account=acc --constraint=v100 --gres=gpu:4 --cpus-per-task=8 --exclude=n1 --licenses=lic --reservation=r "
        "--mem-per-cpu=1G --ntasks-per-node=4"
    )


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("-N2 --gpus=8", ["--gpus-per-node=4"]),
        ("-N2 --gpus=a100:9,v100:1", ["--gpus-per-node=a100:4,v100:1"]),
        ("--gpus=0", ["--gpus-per-node=0"]),
        ("--gres=gpu:2,nvme:3 --ntasks-per-gpu=2", ["--gres=gpu:2,nvme:3", "--ntasks-per-node=4"]),
        ("-N2 --gpus-per-task=1 --ntasks-per-node=4", ["--gpus-per-node=4", "--ntasks-per-node=4"]),
        ("-N2 -n4 --gpus-per-task=h100:2", ["--gpus-per-node=h100:4", "--ntasks-per-node=2"]),
        ("-N1 --tres-per-task=gres/gpu:a100=2", ["--gpus-per-node=a100:2"]),
        (
            "-N1 --tres-per-task=cpu=4,gres/gpu=1,gres/nvme=1",
            ["--gpus-per-node=1", "--cpus-per-task=4", "--tres-per-task=gres/nvme=1"],
        ),
        ("-N1 --export=NONE", ["--get-user-env"]),
        ("-N2 --gpus=8 --ntasks-per-gpu=2", ["--gpus-per-node=4", "--ntasks-per-node=8"]),
    ],
)
def test_gpus_of_the_whole_job_become_gpus_of_a_node(argv: str, wanted: list[str]) -> None:
    assert planned([*argv.split(), "job.sh"]).spec.harvest_options == wanted


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("--gres=gpu:1 -c8 --mem=16G", {"--gres=gpu:1", "--cpus-per-task=8", "--mem=16G"}),
        ("-N2 -G4 --cpus-per-gpu=8 --mem-per-gpu=4G", {"--gpus-per-node=2", "--cpus-per-gpu=8", "--mem-per-gpu=4G"}),
        ("-N2 --ntasks=8 -c2", {"--cpus-per-task=2", "--ntasks-per-node=4"}),
        ("--exclusive --gres=gpu:4 --mem-per-cpu=1G", {"--exclusive", "--mem=0", "--gres=gpu:4"}),
    ],
)
def test_a_harvest_job_takes_as_much_of_a_node_as_the_base_job(argv: str, wanted: set[str]) -> None:
    made = planned([*argv.split(), "job.sh"])
    shape = ("--exclusive", "--mem", "--gres", "--gpus-per-node", "--cpus-per", "--ntasks-per-node")
    # The part of a node that others use is described by itself.
    there = {"--cpus-per-task=4", "--gpus-per-node=1", "--mem=1000M"}
    for part, words in ((None, wanted), (Part("n1", 1, "", 4, 1000), there)):
        made_for_it = harvest_options(made.spec, "t", "low", 30, "o", 1, part=part)
        assert {word for word in made_for_it if word.startswith(shape)} == words


@pytest.mark.parametrize(
    ("line", "header", "variables", "wanted"),
    [
        ([], "--mem=100", {"MEM_PER_CPU": "50"}, ["--mem=100"]),
        (["--mem-per-gpu=9"], "", {"MEM_PER_CPU": "50", "MEM_PER_NODE": "7"}, ["--mem-per-gpu=9"]),
        ([], "--mem=100", {"MEM_PER_NODE": "50"}, ["--mem=50"]),
        ([], "-c2", {"CPUS_PER_GPU": "4"}, ["--cpus-per-task=2"]),
        (["--thread-spec=1"], "", {"CORE_SPEC": "1"}, ["--thread-spec=1"]),
    ],
)
def test_an_option_of_the_environment_gives_way_to_what_rules_it_out(
    line: list[str], header: str, variables: dict[str, str], wanted: list[str]
) -> None:
    script = f"#!/bin/sh\n#SBATCH {header}\nx\n"
    made = planned([*line, "job.sh"], script, **{f"SBATCH_{name}": value for name, value in variables.items()})
    assert made.spec.harvest_options == wanted
    assert base_options(made.spec.sbatch_options, token="t", exported={}) == [*wanted, "--comment=t", "--no-requeue"]
    assert made.options("t", {}) == [*line, "--comment=t", "--no-requeue"]


def test_sbatchs_environment_gives_way_in_later_components_too() -> None:
    script = "#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH --mem-per-cpu=5\nx\n"
    made = planned(["job.sh"], script, SBATCH_MEM_PER_NODE="7")
    assert made.spec.sbatch_options == ["--nodes=1", "--mem=7", ":", "--mem-per-cpu=5"]
    assert made.options("t", {}).count("--comment=t") == 2
    made = planned(["job.sh"], "#!/bin/sh\n#SBATCH --mem=7\n#SBATCH hetjob\n#SBATCH -N1\nx\n", SBATCH_MEM_PER_CPU="5")
    assert made.spec.sbatch_options == ["--mem=7", ":", "--mem=7", "--nodes=1"]


def test_what_a_later_component_of_the_command_line_says_of_the_whole_job_holds_for_earlier_ones() -> None:
    line = "-N1 : -N2 --account=a -C big : -N3 --account=b job.sh"
    made = planned(line.split(), "#!/bin/sh\n#SBATCH --qos=q\nx\n")
    assert " ".join(made.spec.sbatch_options) == (
        "--account=b --qos=q --nodes=1 : --account=a --qos=q --nodes=2 --constraint=big : --account=b --qos=q --nodes=3"
    )
    assert made.spec.harvest_options == ["--account=b", "--qos=q"]
    made = planned(["-N1", "--mem-per-cpu=1", ":", "-N2", "--mem=2", "job.sh"])
    assert made.spec.sbatch_options == ["--nodes=1", "--mem-per-cpu=1", ":", "--nodes=2", "--mem=2"]


@pytest.mark.parametrize(
    ("header", "line", "variables", "barred", "wanted"),
    [
        (  # what meant the first submission is left out
            "-N1 --begin=now+1hour\n#SBATCH hetjob\n#SBATCH -N2 --hold --account='a b'\n#SBATCH --mem=9G",
            "",
            {},
            [],
            ["--nodes=1", "--nodes=2 '--account=a b' --mem=9G"],
        ),
        ("-N1\n#SBATCH hetjob\n#SBATCH -x n1", "", {}, ["n2"], ["--nodes=1 --exclude=n2", "--exclude=n1,n2"]),
        ("-t 5\n#SBATCH hetjob\n#SBATCH -t 9", "", {}, [], ["--time=5", "--time=9"]),
        ("-N1\n#SBATCH hetjob\n#SBATCH -t 9", "-t 7", {}, [], ["--nodes=1 --time=7", "--time=7"]),
        (
            "--mem-per-cpu=1\n#SBATCH hetjob\n#SBATCH --mem=3",
            "",
            {"SBATCH_MEM_PER_NODE": "7"},
            [],
            ["--mem-per-cpu=1", "--mem=7"],
        ),
        (
            "-N1\n#SBATCH hetjob\n#SBATCH -t 9\n#SBATCH hetjob\n#SBATCH --qos=q",
            "",
            {},
            [],
            ["--nodes=1", "--time=9", "--time=9 --qos=q"],
        ),
    ],
)
def test_a_base_job_that_is_submitted_again_has_in_each_component_what_was_in_force_there(
    header: str, line: str, variables: dict[str, str], barred: list[str], wanted: list[str]
) -> None:
    script = f"#!/bin/sh\n#SBATCH {header}\nx\n"
    made = planned([*line.split(), "job.sh"], script, **variables)
    later = script_options(made.spec, barred)
    options = base_options(made.spec.sbatch_options, token="t", exported={}, barred=barred, by_script=later)
    again = parse_script(with_directives(script, later), "job.sh")
    found = in_force(split(["--job-name=t", *options]).components, again.components)
    ours = ["--comment=t", "--job-name=t", "--no-requeue"]
    assert [sorted(given.canonical for given in part.values()) for part in found] == [
        sorted([*shlex.split(part), *ours]) for part in wanted
    ]


@pytest.mark.parametrize("first", [True, False])
def test_what_a_later_component_alone_exports_is_not_what_the_first_one_exports(first: bool) -> None:
    made = planned(["job.sh"], "#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH --export=NONE\nx\n")
    options = (
        made.options("t", {"A": ""})
        if first
        else base_options(made.spec.sbatch_options, token="t", exported={"A": ""}, by_script=script_options(made.spec))
    )
    assert [word for word in options if word.startswith("--export")] == ["--export=ALL", "--export=A"]


@pytest.mark.parametrize(
    ("value", "word"),
    [("1", "--requeue"), ("", "--requeue"), ("Yes", "--requeue"), ("expedite", "--requeue=expedite")]
    + [(value, "--no-requeue") for value in ("0", "no")],
)
def test_a_flag_of_sbatchs_environment_is_set_by_what_sets_it_there(value: str, word: str) -> None:
    made = planned(["job.sh"], SBATCH_REQUEUE=value)
    again = base_options(made.spec.sbatch_options, token="t", exported={})
    assert [option for option in again if "requeue" in option] == [word]
    assert [option for option in made.options("t", {}) if "requeue" in option] == [word]


def test_options_from_sbatchs_environment_reach_harvest_jobs() -> None:
    made = planned(["job.sh"], SBATCH_ACCOUNT="acc", SBATCH_ARRAY_INX="")
    assert (made.spec.harvest_options, made.spec.harvest_account) == (["--account=acc"], "")
    assert planned(["--fallow=harvest-account=spare", "job.sh"]).spec.harvest_account == "spare"


def test_a_harvest_jobs_environment_is_the_users_and_no_other_jobs() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "1", "SBATCH_ACCOUNT": "a", "PMIX_X": "1", "DATA": "/d", "HOME": "/h"}
    environ |= {"SLURM_CONF": "/c", "FALLOW_HEAD__REDIS_URL": "rediss://me:sesame@h"}
    kept = {"PATH": "/bin", "DATA": "/d", "HOME": "/h", "SLURM_CONF": "/c"}
    assert captured_environment(environ) == kept
    assert captured_environment(environ, "ALL,X=1") == kept | {"X": "1"}
    assert captured_environment(environ, "NONE") == {"PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/c"}
    assert captured_environment(environ, "DATA,Y=2") == kept | {"Y": "2"}


def test_no_option_of_ours_is_ever_taken_from_the_user() -> None:
    ours = {word.removeprefix("--").partition("=")[0] for word in harvest_options(spec(), "t", "p", 1, "o", 1)}
    for name in ours:
        assert BY_LONG[name].reach in (Reach.OURS, Reach.BASE)
