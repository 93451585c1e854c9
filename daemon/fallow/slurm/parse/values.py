"""Small values, as all of Slurm's commands write them: numbers, times, sizes, lists of nodes, states of a node."""

import datetime
import re
from collections.abc import Collection, Iterator

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

MOST_NODES = 100_000
"""Maximum names of a folded list. No cluster has more, and unfolding a longer list would take all memory."""

_NOTHING = frozenset(
    ["", "(null)", "N/A", "n/a", "None", "Unknown", "UNLIMITED", "INFINITE", "INVALID", "NOT_SET", "Partition_Limit"]
)
# sinfo(1), NODE STATE CODES: one character behind the state stands for a flag
_STATE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_FLAG_NAMES = {"MAINT": "MAINTENANCE", "NO_RESPOND": "NOT_RESPONDING", "RES": "RESERVED"}
_MULTIPLES = {"K": 1024, "M": 1024**2, "G": 1024**3}


def word(text: str) -> str:
    """The text, or "" for Slurm's words for nothing."""
    text = text.strip()
    return "" if text in _NOTHING else text


def nodes(text: str) -> list[str]:
    """Names in a folded node list, sorted; [] for none, for an unreadable list, and for a list of too many names."""
    text = word(text)
    if not text or text == "ALL":
        return []
    if not any(mark in text for mark in "[],@"):
        return [text]  # by far the most: jobs of one node
    if most_names(text) > MOST_NODES:
        return []
    try:
        # NOGROUP: else `@name` in a node list would make ClusterShell run the site's group commands
        return [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
    except NodeSetException:
        return []


def most_names(text: str) -> int:
    """Maximum number of names in a folded list, without unfolding it."""
    total = 0
    for piece in re.split(r",(?![^\[]*\])", text):
        names = 1
        for inside in re.findall(r"\[([^\]]*)\]", piece):
            # Nobody has nodes of more digits, and Python refuses to read thousands of them.
            ends = re.findall(r"(\d{1,18})-(\d{1,18})", inside)
            names *= max(1, inside.count(",") + 1 + sum(int(last) - int(first) for first, last in ends))
        total += names
    return total


def folded(node_names: Collection[str]) -> str:
    """Names as a node list, `n[1-3],gpu7`; empty for none.

    Brackets stand only at the ends of names: before 23.11 sbatch refuses `r[1-2]n1` and `n[1-2].site`.
    """
    names = sorted(node_names)
    if any(set("[],&!^@ ") & set(name) for name in names):
        return ",".join(names)  # no names of nodes; as they are
    numbered = NodeSet.fromlist([name for name in names if name[-1].isdecimal()], resolver=RESOLVER_NOGROUP)
    numbered.fold_axis = (-1,)
    return ",".join([*filter(None, [str(numbered)]), *(name for name in names if not name[-1].isdecimal())])


def unix_time(text: str) -> float | None:
    """A point in time in Unix seconds: epoch (SLURM_TIME_FORMAT=%s) or ISO in UTC (TZ=UTC); else None."""
    text = word(text)
    if text.isdecimal():
        return float(text) or None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


def duration(text: str) -> float | None:
    """Seconds of `5:00` (minutes:seconds), `1:00:00`, `1-00:00:00`, `2-12` (days-hours), `90` (minutes); None:
    unlimited or not given.
    """
    text = word(text)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:  # minutes[:seconds]; behind days come hours[:minutes[:seconds]]
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def count(text: str) -> int:
    """A number: `8`, `8-8` (the minimum of a range), `2K`; 0 if there is none."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMG]?)", word(text))
    return int(float(match[1]) * _MULTIPLES.get(match[2], 1)) if match else 0


def gpu_types(text: str) -> dict[str, int]:
    """GPUs by type in a list of gres or TRES, type "" where none is named: `gpu:a100:2(IDX:0,2),nvme:1`,
    `gres:gpu:2`, `gres/gpu:a100=2`, `gpu`.
    """
    counts: dict[str, int] = {}
    for name, *fields in _gres(text):
        if name == "gpu":
            number = fields.pop() if fields and re.fullmatch(r"\d+[KMG]?", fields[-1]) else "1"
            kind = ":".join(fields)
            counts[kind] = counts.get(kind, 0) + count(number)
    return counts


def other_gres(text: str) -> list[str]:
    """Names of all gres but GPUs in a list of gres or TRES, sorted: `nvme`."""
    return sorted({name for name, *fields in _gres(text) if name not in ("", "gpu") and fields[-1:] != ["0"]})


def _gres(text: str) -> Iterator[list[str]]:
    """The words of each item: name, and type or number or both."""
    for item in re.sub(r"\([^)]*\)", "", word(text)).split(","):
        yield re.split("[:=]", re.sub("^gres[:/]", "", item))


def megabytes(text: str) -> int:
    """MiB of `4000M`, `2.5G`, `1T`, `500` (MiB); 0 when there is none."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMGTP]?)", word(text))
    return int(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1)) if match else 0


def names(text: str) -> list[str]:
    """Words of a list with commas; [] for none and for ALL."""
    return [] if text.strip().upper() == "ALL" else [name for name in word(text).split(",") if name]


def node_state(text: str) -> tuple[str, list[str]]:
    """Base state and flags of `IDLE+PLANNED`, `DOWN*`, `mixed-`, `IDLE+CLOUD+POWERED_DOWN`."""
    flags: list[str] = []
    base = ""
    for part in text.strip().upper().split("+"):
        name = part.rstrip("".join(_STATE_SUFFIXES))
        suffixes = [_STATE_SUFFIXES[mark] for mark in part[len(name) :]]
        if not base:
            base = name
        elif name:
            flags.append(_FLAG_NAMES.get(name, name))
        flags += suffixes
    return base, list(dict.fromkeys(flags))


def preempt_mode(text: str) -> str:
    """What preemption does to a job: `GANG,SUSPEND`, `REQUEUE`, `cancel,within`; OFF if nothing is said."""
    # The other words say whose jobs, or how SUSPEND is carried out.
    modes = [mode for mode in word(text).upper().split(",") if mode in ("CANCEL", "REQUEUE", "SUSPEND")]
    return modes[0] if modes else "OFF"
