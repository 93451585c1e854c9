"""What Slurm's accounting says of the owner: limits, fair share, priorities."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fallow.model import Exit, FallowError, LimitView, OwnerView, PriorityView, ShareView
from fallow.slurm.owner import owner, parse_limits, parse_priorities, parse_shares

NOW = 1_000_000.0
SAMPLES = Path(__file__).parents[2] / "data" / "slurm" / "accounting"


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


def test_what_binds_others_of_the_account_is_none_of_our_business() -> None:
    user, account = ((SAMPLES / f"assoc_mgr_{of}.txt").read_text() for of in ("user", "account"))
    view = _ask({"users=ann": user, "accounts=lab": account, "accounts=root": "", "sprio": ""})
    assert [limit for limit in view.limits if limit.of == "account lab"] == [
        LimitView(of="account lab", name="GrpJobs", limit=40, used=11),
        LimitView(of="account lab", name="GrpTRES gres/gpu", limit=64, used=24),
    ]
    assert not [limit for limit in view.limits if "bob" in limit.of]
    assert view.shares == [ShareView(account="lab", partition="", shares=0.25, usage=0.4, factor=0.33)]


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
