"""Whether we may harvest at all, how nice our requests are, and whether anybody would take a node back from us."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from builders import cluster, job, node, partition, site
from builders import cluster as poll_of
from fallow.core.checks import site as checks
from fallow.core.checks.site import Level
from fallow.core.neighbour.permission import BASIC_NICE, MAX_NICE, Visibility, needed_nice, nice_for, refusals
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.planning.rules import HarvestRules, harvestable_partitions
from fallow.model import ClusterConfig, ClusterState, JobInfo, PartitionInfo
from fallow.slurm import parse
from fallow.slurm.cli import CliClient

PLAIN = partition("plain", ["n1", "n2"])
LOW = partition("low", ["n1", "n2"], preempt_mode="CANCEL", priority_tier=0)


def busy_and_idle(*partitions: PartitionInfo, jobs: tuple[JobInfo, ...] = ()) -> ClusterState:
    return poll_of([node("n1", "ALLOCATED"), node("n2")], jobs, partitions=partitions or [PLAIN])


def refused(state: ClusterState, config: ClusterConfig | None = None, **told: bool) -> dict[str, str]:
    allowed = {"are_jobs_hidden": False, "allow_unfair": False, **told}
    return dict(refusals(state, config or site(), **allowed))


def test_nice_against_the_weights_of_a_site() -> None:
    text = (
        "PriorityType            = priority/multifactor\nPriorityWeightAge       = 1000\n"
        "PriorityWeightQOS       = 100000\nPriorityWeightAssoc     = 0\n"
        "PriorityWeightTRES      = CPU=1000,GRES/gpu=3000\n"
    )
    config, _ = parse.config(text)
    assert config.priority_weights == {"Age": 1000, "QOS": 100000, "TRES CPU": 1000, "TRES GRES/gpu": 3000}
    assert (needed_nice(config), nice_for(config, 100_000), nice_for(config, 200_000)) == (105_001, 105_001, 200_000)
    assert nice_for(site(), 100_000) == 100_000
    assert parse.config("PriorityWeightTRES = (null)\n")[0].priority_weights == {}


def weighted(*lines: str) -> ClusterConfig:
    told = ["PriorityType = priority/multifactor", "PriorityWeightQOS = 1000", "PriorityWeightTRES = CPU=10", *lines]
    return parse.config("\n".join([*told, ""]))[0]


MULTIFACTOR = {"priority_type": "priority/multifactor"}


@pytest.mark.parametrize(
    ("config", "nice", "words"),
    [
        (weighted("PriorityFlags = CALCULATE_RUNNING,NO_NORMAL_QOS"), None, "leaves the factor of QOS without a bound"),
        (weighted("PriorityFlags = NO_NORMAL_ALL"), None, "leaves the factor of QOS, TRES without a bound"),
        (weighted("PriorityFlags = NO_NORMAL_ASSOC"), 1011, ""),  # its weight is 0
        (weighted("PriorityFlags = CALCULATE_RUNNING,MAX_TRES", "PrioritySiteFactorPlugin = (null)"), 1011, ""),
        (weighted("PriorityFlags =", "PrioritySiteFactorPlugin = site_factor/none"), 1011, ""),
        (weighted("PrioritySiteFactorPlugin = site_factor/lottery"), None, "site_factor/lottery adds to priorities"),
        (site(), BASIC_NICE, ""),
        (site(**MULTIFACTOR, priority_weights={"Age": 1000}), 1001, ""),
        (site(**MULTIFACTOR), None, "the older job goes first"),
        (site(**MULTIFACTOR, priority_weights={"QOS": MAX_NICE}), None, "weights add up to"),
    ],
)
def test_where_no_nice_helps_nothing_is_harvested_unless_slurm_preempts(
    config: ClusterConfig, nice: int | None, words: str
) -> None:
    """Weights bound priorities only where factors are normalized."""
    assert (needed_nice(config), nice_for(config, 100_000)) == (nice, 100_000)
    state = busy_and_idle(PLAIN, replace(LOW, priority_tier=1))
    found = refused(state, config)
    assert set(found) == ({"plain"} if words else set())
    assert words in found.get("plain", "")
    assert not refused(state, config, allow_unfair=True)


def test_where_slurm_preempts_on_some_nodes_only_something_may_speak_against_the_others() -> None:
    mixed = replace(PLAIN, preempt_mode="CANCEL", unpreempted=frozenset(PLAIN.nodes[:1]))
    state = busy_and_idle(mixed)
    found = refused(state, are_jobs_hidden=True)
    assert found["plain"].startswith("on nodes where nobody preempts its jobs: others' jobs cannot be seen")
    assert not refused(state)
    (check,) = checks.partitions(state, ["plain"], True, found)
    assert "not on 1 of its" in check.text


def test_nice_does_not_help_against_partitions_of_a_lower_tier() -> None:
    found = refused(busy_and_idle(PLAIN, LOW))
    assert found == {"plain": "its requests would come before all jobs of low, whose priority tier is lower"}
    assert not refused(busy_and_idle(PLAIN, replace(LOW, up=False)))


@pytest.mark.parametrize("preempt_mode", ["OFF", "REQUEUE"])
def test_one_node_is_not_asked_for_where_jobs_have_more(preempt_mode: str) -> None:
    """Slurm would refuse it every time."""
    pair = replace(PLAIN, min_nodes=2, preempt_mode=preempt_mode)
    found = refused(busy_and_idle(pair), allow_unfair=True)
    assert found == {"plain": "its jobs need at least 2 nodes, and a request has one"}
    (check,) = checks.partitions(busy_and_idle(pair), ["plain"], True, found)
    assert (check.level, check.text) == (Level.FAIL, found["plain"])
    (check,) = checks.partitions(busy_and_idle(pair), [], True, found)
    assert check.level is Level.WARN, "there is no other"


def test_hidden_jobs_are_noticed_and_forbid_harvesting() -> None:
    secretive = site(private_data=["jobs"])
    assert Visibility().look(busy_and_idle(), secretive)
    found = refused(busy_and_idle(), secretive, are_jobs_hidden=True)
    assert found == {"plain": "others' jobs cannot be seen, and Slurm would not preempt ours for them"}
    # Nobody says so, but n1 is in use by nobody, poll after poll.
    watching = Visibility()
    assert [watching.look(busy_and_idle(), site()) for _ in range(4)] == [False, False, True, True]
    seen = busy_and_idle(jobs=(job("1", "RUNNING", nodes=["n1"]),))
    assert not watching.look(seen, site())
    assert [watching.look(busy_and_idle(), site()) for _ in range(3)] == [False, False, True]


# -- would anybody take a node back? On what Slurm prints: the cluster's PreemptMode everywhere -----------------------


CONFIG = """Configuration data as of 2026-01-31T12:00:00
PreemptMode             = REQUEUE
PreemptType             = preempt/{kind}
PreemptExemptTime       = {exempt}
"""

LINE = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes={nodes} PriorityJobFactor=1 "
    "PriorityTier={tier} RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode={mode} "
    "State={state} TotalCPUs=8 TotalNodes=2 SelectTypeParameters=NONE\n"
)

QOS = (
    "normal||cluster||00:00:00\nhigh|normal,idle|requeue||00:00:00\nidle||cluster||00:00:20\n"
    "low|low|cancel||00:00:00\ncalm||suspend||00:00:00\nboss|calm|cluster||00:00:00\n"
)


def line(name: str, tier: int, nodes: str = "n[1-2]", mode: str = "REQUEUE", state: str = "UP") -> str:
    return LINE.format(name=name, tier=tier, nodes=nodes, mode=mode, state=state)


def configured(kind: str, qos: str = QOS, exempt: str = "00:00:00") -> ClusterConfig:
    """The configuration as Slurm and its accounting show it."""
    config, _ = parse.config(CONFIG.format(kind=kind, exempt=exempt))
    return parse.with_qos(config, qos)


def seen(text: str, site: ClusterConfig | None, qos: str | None = None) -> ClusterState:
    """A poll that shows these partitions, as for jobs of ours of this QOS."""
    return as_for_us(cluster([], partitions=parse.cluster(text)[1]), site, qos)


def harvested(text: str, kind: str, qos: str | None = None, modes: str = QOS) -> list[str]:
    """Partitions that are harvested by default."""
    return [p.partition for p in harvestable_partitions(seen(text, configured(kind, modes), qos), HarvestRules())]


@pytest.mark.parametrize(
    ("text", "preempted"),
    [
        (line("batch", 1), []),
        (line("normal", 10) + line("scavenge", 1), ["scavenge"]),
        (line("normal", 10) + line("scavenge", 10), []),
        (line("low", 1) + line("mid", 5) + line("top", 9), ["low", "mid"]),
        (line("normal", 10, mode="OFF") + line("scavenge", 1, mode="CANCEL"), ["scavenge"]),
        (line("normal", 10) + line("scavenge", 1, mode="OFF"), []),
        (line("normal", 10) + line("scavenge", 1, mode="GANG,SUSPEND"), []),
        (line("normal", 10, nodes="n[3-4]") + line("scavenge", 1), []),
        (line("normal", 10, state="DOWN") + line("scavenge", 1), []),
        (line("normal", 10).replace("RootOnly=NO", "RootOnly=YES") + line("scavenge", 1), []),
    ],
)
def test_by_partition_only_a_higher_tier_on_the_same_nodes_preempts(text: str, preempted: list[str]) -> None:
    assert harvested(text, "partition_prio") == preempted
    assert harvested(text, "none") == []
    assert harvested(text, "of_next_year") == []


def test_a_higher_tier_preempts_on_its_own_nodes_only() -> None:
    text = line("top", 10, nodes="n[1-2]") + line("all", 5, nodes="n[1-4]") + line("low", 1, nodes="n[3-6]")
    state = seen(text, configured("partition_prio"))
    assert as_for_us(state, configured("partition_prio"), None) == state, "twice is once"
    assert {p.partition: (p.preempts, p.unpreempted) for p in state.partitions} == {
        "top": (False, frozenset()),
        "all": (True, {"n3", "n4"}),
        "low": (True, {"n5", "n6"}),
    }
    kept = {p.partition: p.nodes for p in harvestable_partitions(state, HarvestRules())}
    assert kept == {"all": ["n1", "n2"], "low": ["n3", "n4"]}
    allowed = HarvestRules(allow_without_preemption=True)
    assert {p.partition: len(p.nodes) for p in harvestable_partitions(state, allowed)} == {"top": 2, "all": 4, "low": 4}
    unfair = HarvestRules(allow_without_preemption=True, refusals={"all": "on some nodes: unfair", "top": "unfair"})
    assert {p.partition: p.nodes for p in harvestable_partitions(state, unfair)} == {
        "all": ["n1", "n2"],
        "low": ["n3", "n4", "n5", "n6"],
    }


@pytest.mark.parametrize(
    ("words", "unpreempted"),
    [
        ("AllowQos=ALL", []),
        ("AllowQos=Boss,high", []),
        ("AllowQos=normal", ["n3", "n4"]),
        ("DenyQos=High", ["n3", "n4"]),
        ("DenyQos=normal", []),
    ],
)
def test_by_qos_a_node_is_taken_where_a_job_of_such_a_qos_may_run(words: str, unpreempted: list[str]) -> None:
    site = configured("qos", "high|idle|cluster||00:00:00\nidle||cluster||00:00:20\n")
    text = line("other", 1, nodes="n[1-2]") + line("scavenge", 1, nodes="n[1-4]").replace("AllowQos=ALL", words)
    state = seen(text, site, "idle")
    assert [(p.preempts, sorted(p.unpreempted)) for p in state.partitions] == [(True, []), (True, unpreempted)]


def test_by_qos_the_tier_of_a_partition_preempts_nobody() -> None:
    both = line("normal", 10) + line("scavenge", 1)
    assert harvested(both, "qos") == []
    assert harvested(both, "qos", "idle") == harvested(both, "qos", "IDLE") == ["scavenge", "normal"]
    assert harvested(both, "qos", "high") == [], "nobody preempts those"
    assert harvested(both, "qos", "low") == [], "its own jobs do not count"
    assert harvested(both, "qos", "calm") == [], "suspended, not ended"
    assert harvested(both, "qos", "idle", modes="") == [], "accounting did not answer"
    assert harvested(both, "partition_prio", "idle") == ["scavenge"]


@pytest.mark.parametrize(
    ("cluster_wide", "modes", "qos", "partition_qos", "preempted"),
    [
        ("00:00:00", QOS, None, "N/A", True),
        ("01:00:00", QOS, None, "N/A", False),
        ("1-00:00:00", QOS, "idle", "N/A", False),
        ("UNLIMITED", QOS, "idle", "N/A", True),  # -1: the option is off
        ("01:00:00", QOS.replace("idle||cluster|", "idle||cluster|00:00:00"), "IDLE", "N/A", True),
        ("00:00:00", QOS.replace("idle||cluster|", "idle||cluster|00:10:00"), "idle", "N/A", False),
        ("00:00:00", QOS.replace("boss|calm|cluster|", "boss|calm|cluster|00:10:00"), "idle", "N/A", True),
        ("00:00:00", QOS.replace("boss|calm|cluster|", "boss|calm|cluster|00:10:00"), "idle", "boss", False),
        ("00:00:00", QOS.replace("boss|calm|cluster|", "boss|calm|cluster|00:10:00"), None, "N/A", False),  # which one?
    ],
)
def test_where_new_jobs_are_safe_nobody_takes_a_node_back(
    cluster_wide: str, modes: str, qos: str | None, partition_qos: str, preempted: bool
) -> None:
    site = configured("partition_prio", modes, cluster_wide)
    both = line("normal", 10) + line("scavenge", 1).replace("QoS=N/A", f"QoS={partition_qos}")
    state = seen(both, site, qos)
    assert [p.partition for p in state.partitions if p.preempts] == (["scavenge"] if preempted else [])
    told = checks.harvest_qos(site, qos)
    assert preempted or partition_qos != "N/A" or (told is not None and "no preemption" in told.text)


def test_a_site_that_has_not_told_its_configuration_is_not_believed_to_preempt() -> None:
    assert {p.preempt_mode for p in seen(line("a", 1) + line("b", 2), None, "idle").partitions} == {"OFF"}


def test_how_jobs_of_a_qos_are_preempted() -> None:
    odd = configured("qos", "sacctmgr: error: no\n\nidle||cancel,within||\nh|idle|off||\n")
    assert odd.qos_preempt_modes == {"idle": "CANCEL"}
    assert parse.config("PreemptMode = GANG,SUSPEND\nPreemptType = preempt/none\n")[0].preempt_mode == "SUSPEND"


# `sacctmgr -n -P show qos` of 22.05.8. There, in a partition with PreemptMode=OFF and GraceTime=0, a job of `harvest`
# was preempted for one of `normal`, with 10 s from PreemptTime to EndTime.
RECORDED = "normal|harvest|cluster||00:00:00\nharvest||requeue||00:00:10\nhigh|harvest,normal|cluster||00:00:00\n"


def recorded(qos: str) -> list[tuple[str, float, list[str] | None]]:
    """How, after how long and by whom jobs of this QOS are preempted in each of two partitions."""
    text = line("normal", 10) + line("scavenge", 1, mode="OFF")
    partitions = seen(text, configured("qos", RECORDED), qos).partitions
    return [(p.preempt_mode, p.grace_s, p.preempted_by) for p in partitions]


def test_where_qos_decide_a_partition_has_no_say_in_it() -> None:
    assert recorded("harvest") == [("REQUEUE", 10.0, ["normal", "high"])] * 2
    assert recorded("normal") == [("REQUEUE", 0.0, ["high"])] * 2
    assert {mode for mode, *_ in recorded("high")} == {"OFF"}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a command of Slurm's that prints a text and notes what it was called with."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name: str, text: str, code: int = 0, before: str = "") -> None:
        called = f'echo "$@" >> {tmp_path}/asked'
        (tmp_path / name).write_text(f"#!/bin/sh\n{called}\n{before}\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        (tmp_path / name).chmod(0o755)

    return make


async def test_the_accounting_is_asked_where_qos_decides(command: Callable[..., None], tmp_path: Path) -> None:
    def show(kind: str) -> None:
        command("scontrol", CONFIG.format(kind=kind, exempt="00:00:00"))

    show("qos")
    command("sacctmgr", QOS)
    client = CliClient()
    assert (await client.config()).qos_preempt_modes == {"normal": "REQUEUE", "idle": "REQUEUE", "calm": "SUSPEND"}
    command("sacctmgr", "", 1)
    assert (await client.config()).qos_preempt_modes == {}
    asked = await asyncio.to_thread((tmp_path / "asked").read_text)
    assert asked.count("show qos format=Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime") == 2
    show("none")
    await client.config()
    assert (await asyncio.to_thread((tmp_path / "asked").read_text)).count("show qos") == 2
    show("partition_prio")
    command("sacctmgr", QOS.replace("calm||suspend|", "calm||suspend|1-00:00:00"))
    config = await client.config()
    assert (config.qos_preempt_modes, config.qos_exempt_s) == ({}, {"calm": 86400.0})


async def test_an_accounting_that_is_away_makes_no_partition_preempt(command: Callable[..., None]) -> None:
    def preempts(site: ClusterConfig) -> bool:
        return any(p.preempts for p in seen(line("normal", 10) + line("scavenge", 1), site, "idle").partitions)

    def store(kind: str) -> None:
        text = CONFIG.format(kind="partition_prio", exempt="00:00:00")
        command("scontrol", f"{text}AccountingStorageType = {kind}\n")

    store("accounting_storage/slurmdbd")
    command("sacctmgr", "", 1)
    client = CliClient()
    config = await client.config()
    assert config.qos_unknown and not preempts(config)
    told = checks.harvest_qos(config, "idle")
    assert told is not None and "accounting does not say" in told.text
    command("sacctmgr", QOS.replace("idle||cluster|", "idle||cluster|00:10:00"))
    safe = await client.config()
    assert not safe.qos_unknown and not preempts(safe), "safe at first"
    command("sacctmgr", "", 1)
    assert await client.config() == safe, "what it said last"
    command("sacctmgr", QOS)
    assert preempts(await client.config())
    # Where there is none, nobody's jobs are safe by their QOS.
    command("sacctmgr", "", 1)
    for kind in ("accounting_storage/none", "(null)"):
        store(kind)
        assert preempts(await CliClient().config())


async def test_polls_do_not_wait_long_for_an_accounting_that_hangs(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("scontrol", CONFIG.format(kind="qos", exempt="0") + "AccountingStorageType = x/slurmdbd\n")
    command("sacctmgr", "", before="exec sleep 300")
    monkeypatch.setattr("fallow.slurm.cli.ACCOUNTING_TIMEOUT_S", 0.2)
    async with asyncio.timeout(120):
        assert (await CliClient().config()).qos_unknown
