"""Parsers of Slurm's output, on real output of four versions and on what users may make of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import PartitionInfo
from fallow.slurm import parse

DATA = Path(__file__).parents[2] / "data" / "slurm" / "26.05"

# The order of fields in the sample.
SQUEUE = (
    *("JobID", "HetJobOffset", "HetJobID", "State", "Reason", "StartTime", "EndTime", "PreemptTime"),
    *("SchedNodes", "NodeList", "TimeLimit", "Comment"),
)


def test_26_05_shows_jobs_and_nodes_like_the_others() -> None:
    """The others have answered the client's own queries, see `core/neighbour/test_recorded.py`."""
    rows = (DATA / "squeue_O.2grace.txt").read_text().splitlines()
    jobs = [parse.job(dict(zip(SQUEUE, row.split("|"), strict=True))) for row in rows]
    warned = [job for job in jobs if job.state == "RUNNING"]
    assert [(job.nodes, job.preempt_at, job.end_at) for job in warned] == [
        (["n2"], 1795226998.0, 1795227008.0),
        (["n3"], 1795226998.0, 1795227008.0),
    ]
    [pending] = [job for job in jobs if job.state == "PENDING"]
    assert (pending.reason, pending.time_limit_s, pending.planned_nodes[:2]) == ("Resources", 1200.0, ["n0", "n1"])
    nodes = parse.cluster((DATA / "scontrol_node.1pending_running_het.txt").read_text())[0]
    assert (nodes[0].state, nodes[0].arch, nodes[0].cpus_used, nodes[0].memory_mb) == ("MIXED", "x86_64", 1, 4000)
    full = nodes[2]
    assert (full.node, full.state, full.flags, full.partitions) == ("n2", "ALLOCATED", [], ["normal", "scavenge"])
    assert (full.cpus, full.cpus_used, full.gpus, full.gpu_types) == (4, 4, 4, {"": 4})


def test_partitions_say_who_may_use_them_and_how() -> None:
    text = (
        "PartitionName=gpu AllowGroups=ml,bio AllowAccounts=physics,bio DenyQos=long ExclusiveUser=YES "
        "MaxNodes=4 MinNodes=2 RootOnly=NO ReqResv=YES OverSubscribe=EXCLUSIVE PriorityTier=1 State=UP\n"
        "PartitionName=any AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL ExclusiveUser=NO "
        "MaxNodes=UNLIMITED MinNodes=0 RootOnly=YES ReqResv=NO OverSubscribe=FORCE:2 PriorityTier=1 State=UP\n"
    )
    assert parse.cluster(text)[1] == [
        PartitionInfo(
            partition="gpu",
            nodes=[],
            allow_groups=["ml", "bio"],
            allow_accounts=["physics", "bio"],
            deny_qos=["long"],
            exclusive=True,
            exclusive_user=True,
            max_nodes=4,
            min_nodes=2,
            requires_reservation=True,
        ),
        PartitionInfo(partition="any", nodes=[], root_only=True),
    ]


def test_26_05_has_other_words_for_whole_nodes() -> None:
    # src/api/partition_info.c of 26.05: in place of ExclusiveUser=, ExclusiveTopo= and OverSubscribe=EXCLUSIVE
    words = ("NO", "NODE", "USER", "TOPO")
    text = "".join(f"PartitionName={word} Exclusive={word} OverSubscribe=NO State=UP\n" for word in words)
    found = {info.partition: (info.exclusive, info.exclusive_user) for info in parse.cluster(text)[1]}
    assert found == {"NO": (False, False), "NODE": (True, False), "USER": (False, True), "TOPO": (True, False)}


def test_whether_a_job_takes_whole_nodes() -> None:
    for shared, exclusive, whole in (
        ("NO", "NODE", True),  # these two as a real 26.05.5 showed a job with --exclusive and one without
        ("NO", "NO", False),
        ("NO", "", True),  # older: squeue has no such field
        ("USER", "", False),
    ):
        row = {"JobID": "1", "State": "PENDING", "OverSubscribe": shared, "Exclusive": exclusive}
        assert parse.job(row).exclusive is whole
        assert parse.job(row).exclusive_user is ("USER" in (shared, exclusive))


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("MIXED-", "MIXED", ["PLANNED"]),
        ("DOWN*+DRAIN+MAINT", "DOWN", ["NOT_RESPONDING", "DRAIN", "MAINTENANCE"]),
        ("SOMETHING_NEW+ELSE", "SOMETHING_NEW", ["ELSE"]),
        ("", "", []),
    ],
)
def test_node_states(text: str, base: str, flags: list[str]) -> None:
    assert parse.node_state(text) == (base, flags)


@pytest.mark.parametrize(
    ("read", "known", "unknown"),
    [
        (parse.megabytes, {"4000M": 4000, "2.5G": 2560, "1T": 1048576, "500": 500, "2048K": 2, "N/A": 0, "": 0}, ""),
        (parse.count, {"8": 8, "8-8": 8, "2K": 2048, "1.5K": 1536, "N/A": 0, "": 0, "x": 0}, ""),
        (
            parse.duration,
            {"5:00": 300.0, "0:07": 7.0, "1:02:03": 3723.0, "1-00:00:00": 86400.0, "2-12": 216000.0, "90": 5400.0},
            "UNLIMITED Partition_Limit NOT_SET later",
        ),
        (
            parse.unix_time,
            {"1795226961": 1795226961.0, "2026-11-21T02:09:21": 1795226961.0, "Tomorr 12:00": None},
            "N/A Unknown None 0 ²",
        ),
        (parse.other_gres, {"gpu:2(S:0,1),nvme:fast:7(S:0),shard:8": ["nvme", "shard"], "gres/nvme:1": ["nvme"]}, ""),
        (
            parse.gpu_types,
            {"gpu:a100:2(IDX:0,2),gpu:v100:1,nvme:7": {"a100": 2, "v100": 1}, "gpu": {"": 1}, "(null)": {}},
            "",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numbers_and_times(read: Callable[[str], object], known: dict[str, object], unknown: str) -> None:
    assert {text: read(text) for text in known} == known
    assert {read(text) for text in unknown.split()} <= {None}


@pytest.mark.parametrize(
    ("shown", "licenses"),
    [
        ("(null)", {}),
        ("solver", {"solver": 1}),
        ("solver:2,mesh@db:3", {"solver": 2, "mesh@db": 3}),
        ("a:2|b:1", {"a": 2, "b": 1}),
    ],
)
def test_licenses_of_a_job(shown: str, licenses: dict[str, int]) -> None:
    assert parse.job({"JobID": "1", "State": "PENDING", "ArrayJobID": "1", "Licenses": shown}).licenses == licenses


def test_node_lists() -> None:
    assert parse.nodes("n[1-3],gpu-a[08-09]") == ["gpu-a08", "gpu-a09", "n1", "n2", "n3"]
    assert parse.nodes("(null)") == [] and parse.nodes("") == []
    assert parse.nodes("n[1-") == [], "cannot be read: none, not an error"
    assert parse.nodes("n[1-99999999]") == parse.nodes("a[1-999]b[1-999]") == [], "too many: none is made"
    assert parse.nodes("@all") == ["@all"], "a name; never the site's group commands"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("n1 n2 n3 gpu7", "gpu7,n[1-3]"),
        ("r1n1 r2n1", "r1n1,r2n1"),
        ("r1n1 r1n2 r2n1 r2n2", "r1n[1-2],r2n[1-2]"),
        ("n1.site n2.site login", "login,n1.site,n2.site"),
        ("n1 n2 n3.site", "n[1-2],n3.site"),
        ("", ""),
    ],
)
def test_a_list_that_every_sbatch_reads(names: str, text: str) -> None:
    assert parse.folded(names.split()) == text
    assert parse.nodes(text) == sorted(names.split())


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


@given(names=st.lists(st.tuples(TEXT, TEXT), max_size=5))
def test_no_name_or_comment_breaks_a_row(names: list[tuple[str, str]]) -> None:
    text = ""
    for index, (name, comment) in enumerate(names):
        values = {"JobID": str(index), "Name": name, "Comment": comment}
        row = [values.get(field, "") for field in parse.JOB_FIELDS]
        text += "|5ca1ab1e|".join(row) + "|5ca1ab1e.\n"
    assert [(job.job_id, job.name) for job in parse.jobs(text, "5ca1ab1e")] == [
        (str(index), name) for index, (name, _) in enumerate(names)
    ]


def test_configuration() -> None:
    """Lines that the recorded outputs do not contain."""
    config, as_of = parse.config(
        "Configuration data as of 1795229432\nMessageTimeout          = 20 sec\n"
        "PreemptType             = preempt/none\nPrivateData             = jobs,usage\n"
    )
    assert (as_of, config.message_timeout_s, config.backfill_interval_s) == (1795229432.0, 20.0, 30.0)
    assert (config.private_data, config.preempt_type) == (["jobs", "usage"], "")
    for text in ("SchedulerType = sched/builtin\n", "SchedulerParameters = bf_max_time=9,bf_interval=-1\n"):
        assert parse.config(text)[0].backfill_interval_s < 0


FAILED = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (f"{FAILED}Invalid partition name specified", True),
        ("sbatch: unrecognized option '--bogus'", True),
        ("Segmentation fault", False),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}{POLICY}", True),
        ("allocation failure: Requested node configuration is not available", True),
        (f"{FAILED}Socket timed out on send/recv operation", False),
        (f"{FAILED}Unable to contact slurm controller (connect failure)", False),
        (f"{FAILED}Rate limit exceeded, please retry momentarily", False),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", False),
        ("", False),
    ],
)
def test_what_refuses_a_submission_and_what_leaves_it_open(message: str, refused: bool) -> None:
    assert parse.is_refusal(message) is refused
    assert not refused or not {"sbatch:", "error"} & set(parse.complaint(message).split())
