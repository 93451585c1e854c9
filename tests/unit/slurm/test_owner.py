"""What Slurm's accounting says of the owner: limits, fair share, priorities."""

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


def ask(answers: dict[str, str | FallowError]) -> tuple[OwnerView, list[str]]:
    """Return the view made from `answers` (word of a command -> its output), and the arguments of each `assoc_mgr`
    query.
    """
    asked: list[str] = []

    async def query(argv: list[str]) -> str:
        asked.append(argv[3])
        found = next(answer for words, answer in answers.items() if words in " ".join(argv))
        if isinstance(found, FallowError):
            raise found
        return found

    return asyncio.run(owner(query, "ann", NOW)), asked[:-1]


def test_a_cluster_without_slurmdbd_is_told_in_words() -> None:
    view, _ = ask(
        {
            "assoc_mgr": (SAMPLES / "assoc_mgr_none.txt").read_text(),
            "sprio": FallowError("sprio: You are not running a supported priority plugin", Exit.UNAVAILABLE),
        }
    )
    assert (view.limits, view.shares, view.priorities) == ([], [], [])
    assert view.notes == [
        "the cluster has no accounting (slurmdbd): no limits of accounts or QOS, and no fair share",
        "this cluster does not use priority/multifactor, so sprio shows no priorities",
    ]


def test_limits_of_the_accounts_above_are_asked_for_once_a_level_and_what_binds_others_is_none_of_our_business() -> (
    None
):
    user, whole = ((SAMPLES / f"assoc_mgr_{of}.txt").read_text() for of in ("user", "account"))
    above = {"lab": "physics(5)", "physics": "root(1)", "root": ""}
    levels = {
        f"accounts={account}": whole.replace("Account=lab UserName= ", f"Account={account} UserName= ").replace(
            "ParentAccount=root(1)", f"ParentAccount={parent}"
        )
        for account, parent in above.items()
    }
    view, asked = ask({"users=ann": user, "sprio": "", **levels})
    assert asked == ["users=ann", *levels]
    assert [limit for limit in view.limits if limit.of.startswith("account ")] == [
        LimitView(of=f"account {account}", name=name, limit=limit, used=used)
        for account in above
        for name, limit, used in (("GrpJobs", 40.0, 11.0), ("GrpTRES gres/gpu", 64.0, 24.0))
    ]
    assert not [limit for limit in view.limits if "bob" in limit.of]
    assert view.shares == [ShareView(account="lab", partition="", shares=0.25, usage=0.4, factor=0.33)]
