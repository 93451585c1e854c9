"""Why Slurm leaves a request pending, and what follows: wait, ask for less time, or leave something alone. Pure.

Reasons: squeue(1), JOB REASON CODES, and `job_reason_string` in Slurm's sources. Those of associations and QOS mostly
begin with `Assoc` and `QOS`; new ones appear with every release, so they are told apart by their words.
"""

import re
from enum import StrEnum

import msgspec

from fallow.model import RunSpec

FIRST_S, LONGEST_S = 60.0, 3600.0
"""A scope is left alone for a minute after the first time, for twice as long after each further one, an hour at most.
(HyperQueue's steps are 0, 1, 15, 30 and 60 minutes.)"""

SHORTER_S = 600.0
"""For so long lengths are kept below one that did not work."""


def pause_s(before: int) -> float:
    """For how long a scope is left alone. Args: before: how often it was already."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(before, 10))


class Scope(StrEnum):
    """What is left alone."""

    NOTHING = "nothing"
    "it waits as it should"
    LENGTH = "length"
    "the limit is too long"
    OWNER = "owner"
    "the account and QOS are at a limit"
    PARTITION = "partition"
    "this account and QOS in this partition"


_LENGTH = re.compile(
    r"TimeLimit|time limit is invalid|MaxWall|reserved for maintenance|^Reservation$|ReqNodeNotAvail.*Reserved",
    re.IGNORECASE,
)
# Limits of a QOS for each account, and some for each user, have names without QOS: MaxNodePerAccount.
_OWNER = re.compile(
    r"^(Assoc|QOS|Association)|^Max\w+Per(Account|User)$|InvalidAccount|InvalidQOS|MaxSubmit|accounting/QOS policy",
    re.IGNORECASE,
)
_PARTITION = re.compile(r"NotAllowed$", re.IGNORECASE)
_WAITS = re.compile(
    r"^(None|Booting|Resources|Priority|Dependency|BeginTime|Cleaning|Prolog|WaitingForScheduling|BurstBuffer.*|Licenses|"
    r"JobArrayTaskLimit|NodesBusy|FrontEndDown|SchedDefer|Nodes required for job are DOWN, DRAINED(, REBOOTING)? or "
    r"reserved for jobs in higher priority partitions|.*topology.*|Weight-based selection could not satisfy.*)?$",
    re.IGNORECASE,
)


def scope_of(reason: str) -> Scope:
    """What a reason of a pending job, or the words of a refusal, says must be left alone."""
    text = _plain(reason)
    if _WAITS.match(text):
        return Scope.NOTHING
    if _LENGTH.search(text):
        return Scope.LENGTH
    if _OWNER.search(text) and not _PARTITION.search(text):
        return Scope.OWNER
    return Scope.PARTITION


def _plain(reason: str) -> str:
    return reason.strip().strip("()").replace("_", " ")


class Asker(msgspec.Struct, frozen=True, cache_hash=True):
    """In whose name is asked; empty: the user's defaults."""

    account: str = ""
    qos: str = ""

    @classmethod
    def of(cls, spec: RunSpec, ordered: "Asker | None" = None) -> "Asker":
        """For harvest jobs of a run: what its script says, else the configuration, else as the base job.

        In lower case, as Slurm shows all accounts and QOS, however somebody has written them (`xstrtolower` in Slurm's
        job_mgr.c and read_config.c).
        """
        given, ordered = spec.harvest_given, ordered or cls()
        account = spec.harvest_account or ordered.account or given.get("account", "")
        return cls(account.lower(), (ordered.qos or given.get("qos", "")).lower())

    def __str__(self) -> str:
        return f"account {self.account or 'by default'}, QOS {self.qos or 'by default'}"


ANYBODY = Asker("*", "*")
"""Stands for every account and QOS; none has such a name."""


class Strikes(msgspec.Struct):
    """How often one scope was left alone, and what follows."""

    count: int = 0
    until: float = 0.0
    tries: int = 1
    "requests that may wait after that; twice as many each time that all of them start"
    freed: int = 0
    "jobs of ours that have ended, and in whose place none has started yet: as many may be asked for at once"
    freed_now: tuple[float, int] = (0.0, 0)
    "when the last ones did, and how many"

    def add(self, now: float) -> None:
        """Once more: leave it alone from now on, for longer than the time before."""
        self.until = now + pause_s(self.count)
        self.count += 1


class Backoff(msgspec.Struct):
    """What is left alone, and until when (Unix time)."""

    alone: dict[tuple[str, str, str], Strikes] = {}
    "(partition or nothing, account, QOS), or `_of_run`"
    lengths: dict[tuple[str, str, str], tuple[int, float]] = {}
    "(partition, account, QOS) -> minutes that do not start there, and until when that counts"

    def strike(self, reason: str, asker: Asker, partition: str, minutes: int | None, now: float) -> bool:
        """A request waits for this reason, or was refused for it; True when it had better be withdrawn."""
        scope = scope_of(reason)
        if scope is Scope.NOTHING:
            return False
        if scope is Scope.LENGTH and minutes is not None and minutes > 1:
            # A limit of an account or a QOS binds nobody else.
            self.too_long(partition, minutes, now, asker if _OWNER.search(_plain(reason)) else ANYBODY)
            return True
        strikes = self.alone.setdefault(_key(scope, asker, partition), Strikes())
        at, freed = strikes.freed_now
        # What waited before the last of ours ended says nothing about the room that this left.
        since = min(strikes.freed, freed) if at == now else 0
        if now >= strikes.until or since < strikes.freed:
            strikes.add(now)
        strikes.tries, strikes.freed = 1, since
        return True

    def put_off(self, what: str, now: float) -> None:
        """Leave jobs of one run alone, whatever went wrong: that says nothing of other runs.

        Args:
            what: `base_job` or `harvest_jobs` of a run.
            now: Unix time.
        """
        self.alone.setdefault(_of_run(what), Strikes()).add(now)

    def take_up(self, what: str) -> None:
        """They are well again, or somebody says so."""
        self.alone.pop(_of_run(what), None)

    def put_off_until(self, what: str) -> float:
        """Unix time before which nothing is asked for; 0: now."""
        return self.alone.get(_of_run(what), Strikes()).until

    def too_long(self, partition: str, minutes: int, now: float, asker: Asker = ANYBODY) -> None:
        """Requests of so many minutes do not start there now, in this name."""
        key = _key(Scope.LENGTH, asker, partition)
        known, until = self.lengths.get(key, (minutes, 0.0))
        self.lengths[key] = (min(minutes, known) if now < until else minutes, now + SHORTER_S)

    def started(self, asker: Asker, partition: str, now: float) -> None:
        """A request has become a job. One more than before the limit: there is room, nobody knows how much.

        To ask for all that is idle then would have all but a few wait, again after every job that ends.
        """
        self.alone.pop(_key(Scope.PARTITION, asker, partition), None)
        strikes = self._of(asker)
        if strikes.freed:
            strikes.freed -= 1
        else:
            strikes.count, strikes.tries = max(0, strikes.count - 1), strikes.tries + 1
            strikes.until = min(strikes.until, now)

    def eased(self, asker: Asker, now: float, jobs: int = 1) -> None:
        """So many of our jobs have ended: a limit of this account or QOS may have room for as many again."""
        strikes = self._of(asker)
        strikes.freed += jobs
        strikes.freed_now = now, jobs

    def room(self, asker: Asker, now: float) -> int | None:
        """As many requests may wait in this name; None: no limit of its account or QOS is known."""
        if _key(Scope.OWNER, asker, "") not in self.alone:
            return None
        strikes = self._of(asker)
        return strikes.freed if now < strikes.until else max(strikes.freed, strikes.tries)

    def forget(self, asker: Asker) -> None:
        """Somebody says that it is all right now: leave nothing alone for the sake of this account and QOS."""
        name = asker.account, asker.qos
        self.alone = {key: strikes for key, strikes in self.alone.items() if key[1:] != name}
        self.lengths = {key: bound for key, bound in self.lengths.items() if key[1:] != name}

    def bound(self, now: float) -> None:
        """Leave nothing alone for longer than ever meant, also where a clock was set back.

        What nobody has asked for in an hour is forgotten, but for limits of accounts and QOS.
        """
        self.alone = {key: s for key, s in self.alone.items() if not key[0] or now < s.until + LONGEST_S}
        for strikes in self.alone.values():
            strikes.until = min(strikes.until, now + LONGEST_S)
        for key, (minutes, until) in self.lengths.items():
            self.lengths[key] = (minutes, min(until, now + SHORTER_S))

    def until(self, asker: Asker, partition: str) -> float:
        """Unix time before which nothing is asked for there; 0: now."""
        return max(self.owner_until(asker), self.alone.get(_key(Scope.PARTITION, asker, partition), Strikes()).until)

    def owner_until(self, asker: Asker) -> float:
        """Unix time before which nothing is asked for in this name anywhere; 0: now."""
        strikes = self._of(asker)
        return 0.0 if strikes.freed else strikes.until

    def _of(self, asker: Asker) -> Strikes:
        return self.alone.get(_key(Scope.OWNER, asker, ""), Strikes())

    def words(self, asker: Asker, partition: str, now: float) -> str:
        """What is left alone there, and for how long; empty: nothing."""
        until, owner_until = self.until(asker, partition), self.owner_until(asker)
        if until <= now:
            return ""
        # A limit of the account binds in every partition; naming one would send people to look there.
        where = f"by {asker}" if owner_until == until else f"in {partition}"
        return f"nothing is asked for {where} for {until - now:.0f} s"

    def longest(self, asker: Asker, partition: str, now: float) -> int | None:
        """Ask for no more minutes than that there; None: no bound is known."""
        bounds = (self.lengths.get(_key(Scope.LENGTH, whose, partition), (0, 0.0)) for whose in (asker, ANYBODY))
        return min((max(1, minutes // 2) for minutes, until in bounds if now < until), default=None)


def base_job(run: str) -> str:
    """What stands for the base job of a run, where else a partition stands; no partition has such a name."""
    return f"base job of {run}"


def harvest_jobs(run: str) -> str:
    """The same for all of its harvest jobs."""
    return f"harvest jobs of {run}"


def _of_run(what: str) -> tuple[str, str, str]:
    """Key of `base_job` or `harvest_jobs`. It names no account, not even the default one: `forget` must spare it."""
    return what, what, what


def _key(scope: Scope, asker: Asker, partition: str) -> tuple[str, str, str]:
    return ("" if scope is Scope.OWNER else partition, asker.account, asker.qos)
