"""What Slurm's accounting says about one user: limits, fair share, priorities.

`scontrol show assoc_mgr` gives limits and their use in one request to slurmctld (Slurm's src/scontrol/info_assoc_mgr.c:
`NAME=LIMIT(USED)`, N for none). sacctmgr would ask slurmdbd, and does not know the use. The answer for a user lacks the
limits from above: those of his accounts (22.05 has these) and of their parent accounts. Each level of accounts takes
one more request. `sprio` takes the last one.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Iterator

from fallow.model import FallowError, LimitView, OwnerView, PriorityView, ShareView

Query = Callable[[list[str]], Awaitable[str]]

_ASSOCIATION = re.compile(r"^ClusterName=\S+ Account=(?P<account>\S+) UserName=(?P<user>[^(\s]*)(?:\((?P<uid>\d+)\))? ")
_LIMIT = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(?:\((\d+(?:\.\d+)?)\))?(?=\s|$)")
_TRES = re.compile(r"(?:^|\s)(\w*TRES\w*)=(\S+)")
_TRES_ITEM = re.compile(r"([\w/:.-]+)=(\d+)(?:\((\d+)\))?")
_LIMIT_NAMES = re.compile(r"(Grp|Max)(Jobs|SubmitJobs|JobsPU|SubmitJobsPU|JobsPA|SubmitJobsPA|Wall|WallPJ)$")
_PRIORITY = ["JOBID", "PRIORITY", "AGE", "FAIRSHARE", "JOBSIZE", "PARTITION", "QOS", "NICE"]
_SPRIO = "%i|%Y|%A|%F|%J|%P|%Q|%N"


async def owner(query: Query, user: str, at: float) -> OwnerView:
    """Ask for everything. What a site does not have becomes a note, not an error.

    Raises:
        FallowError: Slurm does not answer at all.
    """
    text = await query(["scontrol", "show", "assoc_mgr", f"users={user}", "flags=assoc,qos"])
    limits, shares = list(parse_limits(text, user)), parse_shares(text, user)
    notes = []
    queried: set[str] = set()
    level = {share.account for share in shares}
    while level:
        queried |= level
        answer = await query(["scontrol", "show", "assoc_mgr", f"accounts={','.join(sorted(level))}", "flags=assoc"])
        reported = {(limit.of, limit.name) for limit in limits}
        names = {f"account {account}" for account in level}
        own = (limit for limit in parse_limits(answer, user) if limit.of in names)
        limits += [limit for limit in own if (limit.of, limit.name) not in reported]
        level = _parents(answer, level) - queried
    if not shares:
        notes.append("the cluster has no accounting (slurmdbd): no limits of accounts or QOS, and no fair share")
    priorities: list[PriorityView] = []
    try:
        priorities = parse_priorities(await query(["sprio", "-h", "-u", user, "-o", _SPRIO]))
    except FallowError as error:
        if "not running a supported priority plugin" in error.message:
            notes.append("this cluster does not use priority/multifactor, so sprio shows no priorities")
        else:
            notes.append(f"priorities of pending jobs are not available ({error.message})")
    return OwnerView(user=user, at=at, limits=limits, shares=shares, priorities=priorities, notes=notes)


def parse_limits(text: str, user: str) -> Iterator[LimitView]:
    """Every limit of associations and QOS in the answer. Of a QOS's limits per user or account, only the user's own."""
    # A QOS's limits per user carry the user's name and number, in 22.05 only the number.
    heads = [head for line in text.splitlines() if (head := _ASSOCIATION.match(line)) and head["user"] == user]
    for of, line in _lines(text, {user, *(head[key] for head in heads for key in ("account", "uid"))}):
        for name, items in _TRES.findall(line):
            for kind, limit, usage in _TRES_ITEM.findall(items):
                yield LimitView(of=of, name=f"{name} {kind}", limit=float(limit), used=float(usage) if usage else None)
        for name, limit, usage in _LIMIT.findall(line):
            if _LIMIT_NAMES.match(name):
                yield LimitView(of=of, name=name, limit=float(limit), used=float(usage) if usage else None)


def _lines(text: str, own: set[str]) -> Iterator[tuple[str, str]]:
    """(whom the limit binds, line). Sections of a QOS about other users and accounts are omitted."""
    of, inner, is_own = "", 0, False
    for raw in text.splitlines():
        line, depth = raw.strip(), len(raw) - len(raw.lstrip())
        if match := _ASSOCIATION.match(raw):
            user, account = match["user"], f"account {match['account']}"
            of, inner = f"user {user} in {account}" if user else account, 0
        elif line.startswith("QOS=") and depth == 0:
            of, inner = f"QOS {line.removeprefix('QOS=').partition('(')[0]}", 0
        elif line.endswith(" Records"):
            of = ""
        elif line in ("Account Limits", "User Limits"):
            inner = depth
        elif inner and depth == inner + 2:
            # A user or account by name; its limits are deeper.
            is_own = line.partition("(")[0] in own
        elif of and (not inner or depth <= inner or (depth > inner + 2 and is_own)):
            yield of, line


def _parents(text: str, accounts: Collection[str]) -> set[str]:
    """Parents of these accounts; the topmost account has none."""
    parents: set[str] = set()
    is_listed = False
    for raw in text.splitlines():
        if head := _ASSOCIATION.match(raw):
            is_listed = not head["user"] and head["account"] in accounts
        elif is_listed:
            parents.add(_word(raw, "ParentAccount").partition("(")[0])
    return parents - {""}


def parse_shares(text: str, user: str) -> list[ShareView]:
    """The user's fair share in each account and partition."""
    views: list[ShareView] = []
    account = partition = ""
    shares = factor = 0.0
    for raw in text.splitlines():
        head = _ASSOCIATION.match(raw)
        if head is not None:
            account = head["account"] if head["user"] == user else ""
            partition = _word(raw, "Partition")
        elif account and (values := _word(raw, "SharesRaw/Norm/Level/Factor").split("/"))[3:]:
            shares, factor = float(values[1]), float(values[3])
        elif account and (values := _word(raw, "UsageRaw/Norm/Efctv").split("/"))[2:]:
            usage = float(values[2])
            views.append(ShareView(account=account, partition=partition, shares=shares, usage=usage, factor=factor))
    return views


def _word(line: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", line)
    return match[1] if match else ""


def parse_priorities(text: str) -> list[PriorityView]:
    """Read the output of `sprio -h -o` with `_SPRIO`."""
    views = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) != len(_PRIORITY) or not words[0]:
            continue
        try:
            numbers = [float(word) for word in words[1:]]
        except ValueError:
            continue
        factors = {name.lower(): value for name, value in zip(_PRIORITY[2:], numbers[1:], strict=True) if value}
        views.append(PriorityView(job_id=words[0], priority=numbers[0], factors=factors))
    return views
