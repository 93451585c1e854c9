"""Readers of recorded clusters: what is used, what is bad, what has to be assumed, and what is refused."""

import csv
import gzip
from collections import defaultdict
from pathlib import Path

import pytest

from fallow.model import Exit, FallowError
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sacct import COMMAND
from fallow.sim.traces.shipped import FOLDER, trace_path
from fallow.sim.traces.sites import site_from_folder
from fallow.sim.types import Recording, SimJob

DATA = Path(__file__).parents[2] / "data"
SWF, SACCT = DATA / "sim" / "small.swf", DATA / "sim" / "small.sacct.txt"
DAY_S = 86400.0


def jobs(trace: Recording) -> dict[str, SimJob]:
    records = list(trace.jobs)
    assert records == sorted(records, key=lambda job: job.submit_at)
    assert len({job.job_id for job in records}) == len(records)
    return {job.job_id: job for job in records}


def part(job: SimJob) -> tuple[str, int, int, bool]:
    return job.partition, job.nodes, job.gpus_per_node, job.exclusive


def error_of(path: Path, window: Window | None = None, site_folder: Path | None = None) -> FallowError:
    with pytest.raises(FallowError) as error:
        open_trace(path, window, site_folder)
    return error.value


# -- the Standard Workload Format ---------------------------------------------------------------------------------


def test_swf_counts_its_bad_lines_and_uses_the_others() -> None:
    trace = open_trace(SWF, Window(profile="plain"))
    problems = trace.summary
    assert problems.jobs == 6
    assert problems.bad_lines == {
        "completed, and no runtime": 1,
        "it never ran": 1,
        "no processors": 1,
        "not 18 fields": 1,
        "not a number": 1,
        "part of a job that has a line of its own": 1,
        "submitted before the log begins": 1,
    }
    assert problems.examples[0] == "line 15: not 18 fields"
    assert problems.examples[1].startswith("line 16: not a number (\"could not convert string to float: 'sixty'\")")
    assert len(problems.examples) == 5
    assert problems.assumed == [
        "a node has 4 processors, which jobs share as they would GPUs",
        "all partitions have all nodes",
        "a time limit was drawn",
    ]


def test_swf_maps_its_fields() -> None:
    trace = open_trace(SWF, Window(profile="plain"))
    records = jobs(trace)
    assert list(records) == ["1", "2", "3", "5", "6", "13"]
    assert records["2"] == SimJob(
        job_id="2",
        user="u2",
        submit_at=1_000_060.0,
        start_at=1_000_060.0,
        runs_s=1800.0,
        limit_s=3600.0,
        partition="gpu",
        nodes=4,
        gpus_per_node=4,
    )
    assert part(records["3"]) == ("cpu", 1, 2, False)
    assert records["6"].nodes == 2  # asked for 6, which are two nodes
    assert records["13"].limit_s == 40000.0  # it ran for longer than it asked for
    assert {p.partition: (len(p.nodes), p.max_time_s) for p in trace.site.partitions} == {
        "gpu": (4, DAY_S),
        "cpu": (4, DAY_S),
    }
    assert [node.gpus for node in trace.site.nodes] == [4] * 4


HEADER = "JobID|Partition|State|Submit|Start|End|NNodes|NodeList\n"
SOUND = "1|gpu|COMPLETED|1790000000|1790000010|1790003600|2|n[1-2]\n"
SWF_HEADER = "; MaxNodes: {nodes}\n; MaxProcs: 16\n"
SWF_JOB = "{} {} 0 {} {} -1 -1 -1 -1 -1 1 7 1 1 1 1 -1 -1\n"
SWF_SOUND = "".join(SWF_JOB.format(number, 0, 600, 4) for number in range(3))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SWF_HEADER.format(nodes=4) + SWF_SOUND + SWF_JOB.format(3, 0, "1e300", 4), "a hundred years"),
        (SWF_HEADER.format(nodes=4) + SWF_SOUND + SWF_JOB.format(3, 0, 600, 100_000), "than the header's MaxProcs"),
        (HEADER + SOUND + "2|gpu|COMPLETED|1790000000|1790000010|179000000000000|1|n1\n", "later than 2106"),
        (HEADER + SOUND + "2||COMPLETED|1790000000|1790000010|1790000600|1|n1\n", "no partition"),
        ("\ufeff" + HEADER + SOUND + SOUND.replace("|2|", "|1.5K|"), "NNodes is not how many NodeList names"),
    ],
)
def test_lines_that_cannot_be_true_are_skipped(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    trace = open_trace(path)
    ((message, number),) = trace.summary.bad_lines.items()
    assert reason in message and number == 1
    assert len(trace.site.nodes) == (4 if "Max" in text else 2)


def test_a_number_that_comes_twice_is_another_job(tmp_path: Path) -> None:
    path = tmp_path / "two-months.swf"
    path.write_text(SWF_HEADER.format(nodes=4) + 2 * SWF_JOB.format(1, 0, 600, 4))
    assert list(jobs(open_trace(path))) == ["1", "1.1"]


# -- sacct --------------------------------------------------------------------------------------------------------


def test_sacct_counts_its_bad_lines_and_uses_the_others() -> None:
    problems = open_trace(SACCT).summary
    assert problems.jobs == 10
    assert problems.bad_lines == {
        "a step of a job": 1,
        "it ends before it starts": 1,
        "it is over, and has no end": 1,
        "it never ran": 3,
        "NNodes is not how many NodeList names": 1,
        "no job id": 1,
        "no time": 1,
        "not 16 fields": 1,
    }
    assert problems.examples[0] == "line 16: it ends before it starts ('1001000|1000900')"


def test_sacct_maps_its_columns() -> None:
    trace = open_trace(SACCT, Window(profile="plain"))
    records = jobs(trace)
    assert trace.begin == 1_000_600.0  # sacct shows what had not ended by --starttime
    assert trace.end == 1_004_400.0
    assert records["101"] == SimJob(
        job_id="101",
        user="u1",
        submit_at=1_000_600.0,  # before the window: it waits as the window begins
        start_at=1_000_700.0,
        runs_s=3600.0,
        limit_s=7200.0,
        partition="gpu",
        nodes=1,
        gpus_per_node=4,
        priority=100,
        nodelist=("g1",),
    )
    # one GPU of four; two of eight CPUs are as much
    assert part(records["102"]) == part(records["103"]) == ("gpu", 1, 1, False)
    # components of a heterogeneous job are jobs
    assert (part(records["105"]), part(records["106"])) == (("gpu", 1, 4, True), ("cpu", 2, 32, True))
    assert records["107"].nodelist != records["107.1"].nodelist, "it was requeued"
    assert records["108"].runs_s == 1400.0  # was still running
    assert part(records["108"]) == ("cpu", 1, 4, False)
    assert {job.user for job in records.values()} == {"u1", "u2", "u3"}
    assert trace.summary.assumed == [
        "3 nodes in gpu: those that jobs ran on",
        "2 nodes in cpu: those that jobs ran on",
        "GPUs and CPUs of a node are the most that a job had on it",
        "a time limit was drawn (2 times)",
    ]


def test_the_site_of_ones_own_commands(tmp_path: Path) -> None:
    recorded = (DATA / "slurm" / "25.11" / "poll_scontrol.txt").read_text()
    (tmp_path / "nodes.txt").write_text(recorded)
    (tmp_path / "partitions.txt").write_text(recorded)
    (tmp_path / "config.txt").write_text((DATA / "slurm" / "25.11" / "poll_config.txt").read_text())
    site = site_from_folder(tmp_path)
    assert [node.node for node in site.nodes] == ["n1", "n2", "n3", "n4"]
    assert site.scheduler.version == (25, 11)
    assert (site.scheduler.bf_interval_s, site.scheduler.bf_max_job_test) == (1.0, 200)
    assert site.scheduler.bf_window_s == 86400.0
    assert (site.scheduler.kill_wait_s, site.scheduler.message_timeout_s) == (5.0, 10.0)
    assert site.preempt_type == "preempt/partition_prio"
    # the jobs of other partitions are left out
    text = SACCT.read_text().replace("|gpu|", "|normal|")
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    trace = open_trace(path, site_folder=tmp_path)
    assert trace.site.name == site.name
    assert trace.summary.bad_lines["its partition is not among the site's"] == 4
    assert not any("not simulated" in each for each in trace.summary.assumed)
    config = (tmp_path / "config.txt").read_text()
    (tmp_path / "config.txt").write_text(config.replace("preempt/partition_prio", "preempt/qos"))
    assert "preempt/qos is not simulated" in " ".join(open_trace(path, site_folder=tmp_path).summary.assumed)
    (tmp_path / "config.txt").unlink()
    assert "scontrol -o show config" in error_of(path, site_folder=tmp_path).message
    assert error_of(SWF, site_folder=tmp_path).code == Exit.USAGE


# -- holes ------------------------------------------------------------------------------------------------------------


def test_philly_has_its_idle_nodes_as_a_stack(tmp_path: Path) -> None:
    """The node that became idle last is taken first; what was before the window is idle at its begin."""
    path = tmp_path / "philly.csv"
    rows = [
        "0,410,420",
        "600,417,420",
        "660,417,420",
        "720,419,420",
        "600,1,420",
        "780,x,420",
        "840,418,430",
        "900,0,420",
    ]
    path.write_text("time,active_nodes,total_nodes\n" + "".join(f"{row}\n" for row in rows))
    trace = open_trace(path, Window(begin_day=650 / DAY_S))
    assert trace.changes == [(650.0, (0, 1, 2), ()), (720.0, (), (1, 2)), (840.0, (1,), ())]
    assert (trace.end, trace.jobs, len(trace.site.nodes)) == (900.0, (), 420)
    assert trace.summary.bad_lines == {"earlier than the line before": 1, "not a number": 1}


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "file is empty"),
        ("a,b,c\n1,2,3\n", "unknown format"),
        ("JobID|State\n1|COMPLETED\n", "column Partition is missing"),
        (HEADER, "none of its 0 lines can be used"),
        (HEADER + "1|p|COMPLETED|2026-10-01T00:00:00|5|9|1|n1\n", "not Unix seconds"),
        (HEADER + SOUND + "2|p|X\n3|p|X\n", "2 of 3 lines are bad; the first: line 3: not 8 fields"),
        (HEADER + "1|gpu|RUNNING|1790000000|1790000010|Unknown|1|n1\n", "no job in it has ended"),
        ("1|1|ann|gpu|COMPLETED|1790000000|1790000010|1790003600|60|1|||n1|7\n", "--noheader"),
        (SWF_HEADER.format(nodes=1_000_000) + SWF_SOUND, "1,000,000 nodes"),
        ("job_id,queue\n1,a\n", "column submit_time is missing"),
        ("time,active_nodes,total_nodes\n5,x,420\n", "1 of 1 lines are bad"),
        ("begin_s,end_s,nodes\n0,x,1\n", "'x'"),
        ("begin_s,end_s,nodes\n100,90,1\n", "it ends before it begins"),
        ("begin_s,end_s,nodes\n0,10,4734\n5,10,1\n", "more than 4734 nodes are idle at once"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    error = error_of(path)
    assert reason in error.message
    assert error.code == Exit.DATA


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none").code == Exit.NOINPUT
    path = tmp_path / "jobs.csv.gz"
    path.write_bytes(gzip.compress(trace_path("earth").read_bytes())[:500])
    assert error_of(path).code == Exit.DATA
    path.write_bytes(b"no gzip")
    assert "cannot read it" in error_of(path).message
    assert "earth, helios, philly, summit" in error_of(Path("Earth")).message
    outside = error_of(SACCT, Window(begin_day=3.0))
    assert (outside.code, "the trace ends 0.044 days after" in outside.message) == (Exit.USAGE, True)


def test_the_command_asks_for_what_is_read() -> None:
    columns = COMMAND.partition("--format=")[2].split()[0].split(",")
    assert set(columns) <= set(SACCT.read_text().splitlines()[0].split("|"))


# -- what comes with the source -----------------------------------------------------------------------------------


def test_earth_replayed_is_the_recorded_occupancy() -> None:
    """GPUs in use in three partitions in every minute of a day; that in which a job ended counts, as in the source."""
    day, queues = 5, {"vcvlY", "vcSoL", "vc8Sj"}
    trace = open_trace("earth", Window(begin_day=day, days=1))
    changes: dict[tuple[str, bool], dict[float, int]] = defaultdict(lambda: defaultdict(int))
    for job in jobs(trace).values():
        if job.partition in queues and job.gpus_per_node:
            use = changes[job.partition, job.exclusive]
            use[job.submit_at] += job.nodes * job.gpus_per_node
            use[(job.submit_at + job.runs_s) // 60 * 60 + 60] -= job.nodes * job.gpus_per_node
    with gzip.open(FOLDER / "helios_earth_2020-05_occupancy.csv.gz", "rt") as file:
        recorded: dict[tuple[str, bool], dict[float, int]] = defaultdict(dict)
        for row in csv.DictReader(file):
            if row["queue"] in queues:
                recorded[row["queue"], True][float(row["time"])] = int(row["running_gpus_ge8"])
                recorded[row["queue"], False][float(row["time"])] = int(row["running_gpus_lt8"])
    assert (len(recorded), trace.summary.bad_lines["more at once than the queue has"]) == (6, 5119)
    for key, series in recorded.items():
        recorded_gpus = now = 0
        before = [at for at in series if at <= trace.begin]
        recorded_gpus = series[max(before)]
        for minute in range(24 * 60):
            at = trace.begin + 60.0 * minute
            recorded_gpus = series.get(at, recorded_gpus)
            now += changes[key].get(at, 0)
            assert now == recorded_gpus, (key, at)
