"""Where node-seconds go: sums, conservation, money, and what Slurm's accounting says of the owner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.cli import usage as usage_command
from fallow.cli.main import invoke
from fallow.cli.usage import first_day
from fallow.config import Usage, load_config
from fallow.core.accounting.prices import Prices
from fallow.core.accounting.spans import Span, Use
from fallow.core.accounting.usage import (
    DAY_S,
    DAYS_KEPT,
    Tallies,
    Tally,
    by_month,
    day_of,
    is_since,
    note_members,
    note_pause,
    pieces,
    tally,
)
from fallow.core.allocations import Allocation
from fallow.model import (
    PRUNED,
    AllocationKind,
    AllocationState,
    Amount,
    DelayReport,
    Exit,
    FallowError,
    LimitView,
    OwnerView,
    PriorityView,
    ShareView,
    Source,
    UsageReport,
    UsageRow,
)
from fallow.slurm.owner import owner, parse_limits, parse_priorities, parse_shares

NOW = 1_000_000.0
SAMPLES = Path(__file__).parents[2] / "data" / "slurm" / "accounting"


def held(
    kind: AllocationKind = AllocationKind.HARVEST, end: float | None = NOW + 100, gpus: int = 4, **more: Any
) -> Allocation:
    spans = {"7": Span(nodes={"n1": gpus}, start_at=NOW, end_at=end, partition="p")}
    values: dict[str, Any] = {"state": AllocationState.ENDED, "spans": spans, "partition": "p", "settled": True}
    return Allocation(token="t", run="r", kind=kind, public_key="k", **values | more)


def seconds(allocation: Allocation, now: float = NOW + 100) -> dict[Source, float]:
    found: dict[Source, float] = {}
    for piece in pieces(allocation, now):
        found[piece.source] = round(found.get(piece.source, 0.0) + piece.node_s, 6)
    return found


def test_a_harvested_node_from_its_job_to_its_end() -> None:
    allocation = held()
    (use,) = [allocation.uses.setdefault("n1", Use(first_at=NOW + 10, last_at=NOW + 90, member_s=80.0))]
    use.pause_s, use.discarded_s = 2.0, 1.0
    assert seconds(allocation) == {
        Source.START_UP: 10,
        Source.HARVESTED: 77,
        Source.HAND_OVER: 2,
        Source.DISCARDED: 1,
        Source.DRAINED: 10,
    }
    assert sum(piece.gpu_s for piece in pieces(allocation, NOW)) == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("more", "source"),
    [
        ({"slurm_state": "PREEMPTED"}, Source.CUT_SHORT),
        ({"slurm_state": "TIMEOUT"}, Source.CUT_SHORT),
        ({"slurm_state": "FAILED"}, Source.NOTHING),
        ({"slurm_state": "CANCELLED"}, Source.NOTHING),
        ({"state": AllocationState.RUNNING, "settled": False}, Source.START_UP),
    ],
)
def test_a_job_that_never_trained(more: dict[str, Any], source: Source) -> None:
    assert seconds(held(**more)) == {source: 100.0}


def test_the_rest_of_the_script_is_the_users_own() -> None:
    use = {"n1": Use(first_at=NOW, last_at=NOW + 60, member_s=60)}
    assert seconds(held(AllocationKind.BASE, uses=use, end_code=0)) == {Source.BASE: 100.0}
    assert seconds(held(AllocationKind.BASE, uses=use, end_code=93)) == {Source.BASE: 60.0, Source.DRAINED: 40.0}


def test_members_come_and_go() -> None:
    allocation = held(end=None, state=AllocationState.RUNNING, settled=False)
    assert note_members([allocation], {("t", "n1")}, NOW + 10)
    assert not note_members([allocation], {("t", "n1"), ("other", "n2")}, NOW + 15)
    assert note_members([allocation], set(), NOW + 30)
    assert note_members([allocation], {("t", "n1")}, NOW + 40)
    note_pause([allocation], {("t", "n1")}, 0.5, 0.0)
    note_pause([allocation], {("t", "n2")}, 99.0, 99.0)
    assert seconds(allocation, NOW + 50) == {
        Source.START_UP: 10,
        Source.HARVESTED: 29.5,
        Source.HAND_OVER: 0.5,
        Source.STANDBY: 10,
    }


times = st.floats(-3 * DAY_S, 3 * DAY_S).map(lambda offset: NOW + offset)
uses = st.builds(
    Use,
    first_at=times,
    since=st.none() | times,
    last_at=times,
    member_s=st.floats(0, 1e6),
    pause_s=st.floats(0, 1e6),
    discarded_s=st.floats(0, 1e6),
)
allocations = st.builds(
    Allocation,
    token=st.just("t"),
    run=st.just("r"),
    public_key=st.just("k"),
    kind=st.sampled_from(AllocationKind),
    state=st.sampled_from(AllocationState),
    partition=st.sampled_from(["p", "q"]),
    slurm_state=st.sampled_from(["", "PREEMPTED", "COMPLETED"]),
    settled=st.booleans(),
    end_code=st.sampled_from([None, 0, 93]),
    requested_at=times,
    spans=st.dictionaries(
        st.sampled_from(["1", "2"]),
        st.builds(
            Span,
            nodes=st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), st.integers(0, 8)),
            start_at=times,
            partition=st.sampled_from(["p", "q"]),
            end_at=st.none() | times,
        ),
    ),
    uses=st.dictionaries(st.sampled_from(["n1", "n2"]), uses),
)


@given(st.lists(allocations, max_size=5), times)
def test_every_node_second_is_counted_once(held: list[Allocation], now: float) -> None:
    """Base + harvested + wasted = what Slurm allocated, whatever the head's clock said, day by day and in all."""
    sums: Tallies = {}
    for allocation in held:
        tally(sums, allocation, now)
    spans = [span for allocation in held for span in allocation.spans.values()]
    node_s = sum(span.node_s(now) for span in spans)
    gpu_s = sum(span.held_s(now) * gpus for span in spans for gpus in span.nodes.values())
    assert sum(value for one in sums.values() for value in one.node_s.values()) == pytest.approx(node_s, abs=1e-3)
    assert sum(value for one in sums.values() for value in one.gpu_s.values()) == pytest.approx(gpu_s, abs=1e-3)
    assert all(value >= 0 for one in sums.values() for value in one.node_s.values())
    assert all(day.split()[1] in ("p", "q") for day in sums)
    for key, one in sums.items():
        nodes = sum(len(span.nodes) for span in spans)
        assert sum(one.node_s.values()) <= nodes * DAY_S + 1e-3, key
    assert sum(one.jobs for one in sums.values()) == sum(bool(a.spans) or a.live for a in held)


def test_a_job_that_slurm_refused_was_none() -> None:
    sums: Tallies = {}
    tally(sums, held(spans={}), NOW)
    assert [(one.jobs, one.useless) for one in sums.values()] == [(0, 0)]
    tally(sums, held(spans={}, job_id="7"), NOW)
    assert [(one.jobs, one.useless) for one in sums.values()] == [(1, 1)]


def test_time_is_split_at_midnight_utc() -> None:
    midnight = 12 * DAY_S
    allocation = held(
        spans={"7": Span(nodes={"n1": 0, "n2": 0}, start_at=midnight - 600, partition="p", end_at=midnight + 1200)}
    )
    sums: Tallies = {}
    tally(sums, allocation, midnight + 5000)
    assert {key: one.node_s for key, one in sums.items()} == {
        "1970-01-12 p": {Source.NOTHING: 1200.0},
        "1970-01-13 p": {Source.NOTHING: 2400.0},
    }


def test_prices() -> None:
    prices = Prices({"gpu": 2.0, "*": 1.0}, {"gpu": 0.5})
    assert prices.cost("gpu", 3600, 4 * 3600) == 4.0
    assert prices.cost("cpu", 1800, 0) == 0.5
    assert not Prices()


def test_a_price_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[usage]\ncurrency = "EUR"\n[usage.node_hour]\ngpu = 3\n"*" = 0.5\n')
    config = load_config(
        {"FALLOW_CONFIG": str(tmp_path / "c.toml"), "FALLOW_USAGE__GPU_HOUR": "gpu=0.7"}, tmp_path / "no"
    )
    assert config.usage == Usage(node_hour={"gpu": 3.0, "*": 0.5}, gpu_hour={"gpu": 0.7}, currency="EUR")
    with pytest.raises(FallowError) as refused:
        load_config({"FALLOW_CONFIG": str(tmp_path / "c.toml"), "FALLOW_USAGE__GPU_HOUR": "gpu=-1"}, tmp_path / "no")
    assert refused.value.code == Exit.CONFIG


# -- what Slurm's accounting says -----------------------------------------------------------------------------------


def test_limits_of_the_user_the_account_and_the_qos() -> None:
    text = (SAMPLES / "assoc_mgr_user.txt").read_text()
    found = {(limit.of, limit.name): (limit.limit, limit.used) for limit in parse_limits(text, "ann")}
    assert found == {
        ("user ann in account lab", "GrpTRES node"): (4.0, 2.0),
        ("user ann in account lab", "GrpTRESMins cpu"): (600000.0, 1440.0),
        ("user ann in account lab", "MaxJobs"): (10.0, 3.0),
        ("user ann in account lab", "MaxSubmitJobs"): (50.0, 7.0),
        ("user ann in account lab", "MaxWallPJ"): (2880.0, None),
        ("user ann in account lab", "MaxTRESPJ gres/gpu"): (16.0, None),
        ("QOS normal", "GrpSubmitJobs"): (5000.0, 812.0),
        ("QOS normal", "MaxTRESPA gres/gpu"): (48.0, 24.0),
        ("QOS normal", "MaxJobsPU"): (20.0, 3.0),
        ("QOS normal", "MaxTRESPU gres/gpu"): (32.0, 8.0),
    }


def test_22_05_tells_a_users_limits_by_the_number_of_the_user() -> None:
    text = (SAMPLES / "assoc_mgr_user.22.05.txt").read_text()
    found = {(limit.of, limit.name): (limit.limit, limit.used) for limit in parse_limits(text, "ann")}
    assert found == {
        ("user ann in account lab", "GrpJobs"): (3.0, 1.0),
        ("QOS harvest", "GrpTRES node"): (3.0, 1.0),
        ("QOS harvest", "MaxWallPJ"): (30.0, None),
        ("QOS harvest", "MaxJobsPU"): (2.0, 1.0),
        ("QOS harvest", "MaxSubmitJobsPU"): (20.0, 1.0),
        ("QOS harvest", "MaxTRESPU cpu"): (12.0, 4.0),
    }
    assert parse_shares(text, "ann")[0].account == "lab"


def _in_one_line(text: str) -> str:
    """As `scontrol -o show assoc_mgr` prints it: a blank in place of each new line and its indentation."""
    lines: list[str] = []
    for raw in text.splitlines():
        if raw.startswith(" "):
            lines[-1] += f" {raw.strip()}"
        elif raw:
            lines.append(raw.rstrip())
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", ["user", "user.22.05", "account"])
def test_records_in_one_line_say_the_same(name: str) -> None:
    text = (SAMPLES / f"assoc_mgr_{name}.txt").read_text()
    found = [
        {(limit.of, limit.name): limit for limit in parse_limits(each, "ann")} for each in (_in_one_line(text), text)
    ]
    assert found[0] == found[1] != {}
    assert parse_shares(_in_one_line(text), "ann") == parse_shares(text, "ann")


def test_fair_share() -> None:
    text = (SAMPLES / "assoc_mgr_user.txt").read_text()
    assert parse_shares(text, "ann") == [ShareView(account="lab", partition="", shares=0.25, usage=0.4, factor=0.33)]
    assert parse_shares(text, "bob") == []


def test_priorities() -> None:
    text = " 4711|1063|13|1000|50|0|0|0\n4712|12|0|12|0|0|0|100000\nnot a line\n"
    assert parse_priorities(text) == [
        PriorityView(job_id="4711", priority=1063, factors={"age": 13, "fairshare": 1000, "jobsize": 50}),
        PriorityView(job_id="4712", priority=12, factors={"fairshare": 12, "nice": 100000}),
    ]


def _ask(answers: dict[str, str | FallowError]) -> OwnerView:
    async def query(argv: list[str]) -> str:
        found = next(answer for words, answer in answers.items() if words in " ".join(argv))
        if isinstance(found, FallowError):
            raise found
        return found

    return asyncio.run(owner(query, "ann", NOW))


def test_the_accounts_own_limits_are_asked_for() -> None:
    view = _ask(
        {
            "users=ann": (SAMPLES / "assoc_mgr_user.txt").read_text(),
            "accounts=lab": (SAMPLES / "assoc_mgr_account.txt").read_text(),
            "accounts=root": "",
            "sprio": "",
        }
    )
    mine = [limit for limit in view.limits if limit.of == "account lab"]
    assert mine == [
        LimitView(of="account lab", name="GrpJobs", limit=40, used=11),
        LimitView(of="account lab", name="GrpTRES gres/gpu", limit=64, used=24),
    ]
    both = "".join((SAMPLES / f"assoc_mgr_{of}.txt").read_text() for of in ("user", "account"))
    assert _ask({"assoc_mgr": both, "sprio": ""}).limits == list(parse_limits(both, "ann")), "22.05 tells it at once"
    # Bob is in the same account; what binds him is none of our business.
    assert not [limit for limit in view.limits if "bob" in limit.of]
    assert view.notes == []


def test_limits_of_the_accounts_above_are_asked_for_once_a_level() -> None:
    whole, asked = (SAMPLES / "assoc_mgr_account.txt").read_text(), list[str]()

    def level(account: str, parent: str) -> str:
        return whole.replace("Account=lab UserName= ", f"Account={account} UserName= ").replace(
            "ParentAccount=root(1)", f"ParentAccount={parent}"
        )

    answers = {"lab": level("lab", "physics(5)"), "physics": level("physics", "root(1)"), "root": level("root", "")}

    async def query(argv: list[str]) -> str:
        if argv[0] == "sprio":
            return ""
        asked.append(argv[3])
        key, _, account = argv[3].partition("=")
        return answers[account] if key == "accounts" else (SAMPLES / "assoc_mgr_user.txt").read_text()

    limits = asyncio.run(owner(query, "ann", NOW)).limits
    assert asked == ["users=ann", "accounts=lab", "accounts=physics", "accounts=root"]
    jobs = [limit.of for limit in limits if limit.name == "GrpJobs" and limit.of.startswith("account")]
    assert jobs == ["account lab", "account physics", "account root"], "all of them bind"


def test_a_cluster_without_slurmdbd_is_told_in_words() -> None:
    view = _ask(
        {
            "assoc_mgr": (SAMPLES / "assoc_mgr_none.txt").read_text(),
            "sprio": FallowError("sprio: You are not running a supported priority plugin", Exit.UNAVAILABLE),
        }
    )
    assert (view.limits, view.shares, view.priorities) == ([], [], [])
    assert view.notes == [
        "the cluster keeps no accounts (no slurmdbd): there are no limits of accounts or QOS, no fair share",
        "jobs have no priority by factors here (sprio knows only priority/multifactor)",
    ]


# -- what people see -------------------------------------------------------------------------------------------------


def amount(hours: float, cost: float | None = None) -> Amount:
    return Amount(node_s=hours * 3600, gpu_s=hours * 4 * 3600, cost=cost)


ROW = UsageRow(
    key="train-1",
    allocated=amount(10, 20),
    base=amount(4, 8),
    harvested=amount(5.5, 11),
    wasted=amount(0.5, 1),
    causes={Source.START_UP: amount(0.125, 0.25), Source.DRAINED: amount(0.375, 0.75)},
    jobs=12,
    useless_jobs=1,
    budget_node_s=20 * 3600,
    budget_left_s=14.5 * 3600,
)
REPORT = UsageReport(
    at=NOW,
    by="run",
    since="2026-01-02",
    currency="EUR",
    rows=[ROW],
    total=ROW,
    others_delayed=DelayReport(jobs=2, p95_s=3.25, max_s=4.0),
    owner=OwnerView(
        user="ann",
        at=NOW,
        limits=[LimitView(of="account lab", name="GrpJobs", limit=40, used=11)],
        shares=[ShareView(account="lab", partition="", shares=0.25, usage=0.4, factor=0.33)],
        priorities=[PriorityView(job_id="4711", priority=1063, factors={"age": 13})],
        notes=["no\x1b[31m more"],
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    questions: list[dict[str, Any]] = []

    def ask(method: str, *_: Any, **params: Any) -> UsageReport:
        assert method == "usage"
        questions.append(params)
        return REPORT

    monkeypatch.setattr(usage_command, "ask", ask)
    return questions


def test_usage_for_people(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["usage", "--since", "2026-01-02"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node-hours by run, since 2026-01-02 (UTC)",
        "RUN      ALLOCATED  BASE   HARVESTED  WASTED      GPU-HOURS  JOBS  USELESS  COST EUR  BUDGET  LEFT",
        "train-1  10.000     4.000  5.500      0.500 (5%)  40.000     12    1        20.00     20.000  14.500",
        "",
        "wasted, by cause",
        "CAUSE     NODE-HOURS  GPU-HOURS  COST  WHAT",
        "drained   0.375       1.500      0.75  from the last step until Slurm had the node back",
        "start-up  0.125       0.500      0.25  from the start of a job until its node was a member's",
        "",
        "others' jobs that waited because a node was still ours: 2, p95 3.2 s, longest 4.0 s",
        "",
        "Slurm's accounts say of ann",
        "LIMIT OF     LIMIT    AT MOST  USED",
        "account lab  GrpJobs  40       11",
        "fair share of account lab: 0.25 of the machine, used 0.4; factor 0.33 of 1",
        "job 4711 waits with priority 1063 (age 13)",
        r"no\x1b[31m more",
    ]
    assert asked == [{"by": "run", "since": "2026-01-02"}]


def test_runs_that_were_pruned_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned = msgspec.structs.replace(ROW, key=PRUNED)
    monkeypatch.setattr(usage_command, "ask", lambda *_, **__: msgspec.structs.replace(REPORT, rows=[ROW, pruned]))
    assert invoke(["usage"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert names == ["train-1", "pruned runs", "train-1"]


def test_usage_as_json_is_one_value(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["usage", "train-1", "--by", "day", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"][0]["causes"] == {
        "start_up": {"node_s": 450.0, "gpu_s": 1800.0, "cost": 0.25},
        "drained": {"node_s": 1350.0, "gpu_s": 5400.0, "cost": 0.75},
    }
    assert shown["others_delayed"] == {"jobs": 2, "p95_s": 3.25, "max_s": 4.0}
    assert asked == [{"by": "day", "run": "train-1"}]


@pytest.mark.parametrize(
    ("text", "day"), [("2026-01-31", "2026-01-31"), ("1d", "1970-01-12"), ("7d", "1970-01-06"), ("0d", "1970-01-12")]
)
def test_since(text: str, day: str) -> None:
    assert first_day(text, NOW) == day


def test_since_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["usage", "--since", "yesterday"]) == Exit.USAGE
    assert "give a day as 2026-01-31, or 7d" in capsys.readouterr().err


def test_days_of_long_ago_are_shown_as_months() -> None:
    now = 2000 * DAY_S
    first = day_of(now - DAYS_KEPT * DAY_S)
    sums = {f"{day_of(now - days * DAY_S)} p": Tally(node_s={Source.BASE: 1.0}, jobs=1) for days in range(800)}
    found = by_month(sums, now)
    assert sum(one.jobs for one in found.values()) == 800
    assert by_month(found, now) == found
    days = [place for place in found if len(place.partition(" ")[0]) == 10]
    assert min(days) == f"{first[:7]}-01 p" and len(days) < DAYS_KEPT + 31
    assert len(found) - len(days) == 13
    assert found["1974-02 p"].jobs == 28, "a whole month"
    assert is_since("1974-02", "1974-02-20") and not is_since("1974-02", "1974-03-01")
    assert is_since("1974-02-20", "1974-02-20") and not is_since("1974-02-19", "1974-02-20")
