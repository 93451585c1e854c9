"""Why Slurm leaves a request pending, and what follows: wait, request less time, or back off. Pure.

Reasons: squeue(1), JOB REASON CODES, and `job_reason_string` in Slurm's sources. Reasons about associations and QOS
mostly begin with `Assoc` or `QOS`. Every release of Slurm adds reasons, so patterns classify them.
"""

import re
from enum import StrEnum

import msgspec

from fallow.model import RunSpec

FIRST_S, LONGEST_S = 60.0, 3600.0
"""Seconds of backoff: a minute after the first failure, twice as long after each further one, at most an hour.
(HyperQueue's steps are 0, 1, 15, 30 and 60 minutes.)
"""

SHORTER_S = 600.0
"""Seconds for which requests stay shorter than a length that did not start."""


def pause_s(before: int) -> float:
    """Return the seconds of backoff. Args: before: number of earlier failures."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(before, 10))


class Scope(StrEnum):
    """What a backoff applies to."""

    NOTHING = "nothing"
    "no backoff: the request waits as it should"
    LENGTH = "length"
    "the time limit is too long"
    OWNER = "owner"
    "account and QOS: one of their limits is reached"
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
    """Classify the reason of a pending job, or the message of a refused submission."""
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
    """Account and QOS of a request; empty: the user's defaults."""

    account: str = ""
    qos: str = ""

    @classmethod
    def of(cls, spec: RunSpec, configured: "Asker | None" = None) -> "Asker":
        """Account and QOS of a run's harvest jobs: from the run's script, else the configuration, else the base job.

        In lower case, as Slurm shows all accounts and QOS (`xstrtolower` in Slurm's job_mgr.c and read_config.c).
        """
        base_options, configured = spec.harvest_given, configured or cls()
        account = spec.harvest_account or configured.account or base_options.get("account", "")
        return cls(account.lower(), (configured.qos or base_options.get("qos", "")).lower())

    def __str__(self) -> str:
        return f"account {self.account or '(default)'}, QOS {self.qos or '(default)'}"


ANYBODY = Asker("*", "*")
"""Stands for every account and QOS; no account has this name."""


class Strikes(msgspec.Struct):
    """Failures of one scope, and the backoff that follows."""

    count: int = 0
    until: float = 0.0
    tries: int = 1
    "requests that may wait after the backoff; twice as many each time that all of them start"
    vacancies: int = msgspec.field(default=0, name="freed")
    "our ended jobs that no new job has replaced: as many requests may be submitted at once"
    newest_vacancies: tuple[float, int] = msgspec.field(default=(0.0, 0), name="freed_now")
    "(Unix time, number) of our jobs that ended last"

    def add(self, now: float) -> None:
        """Back off from now on, for longer than the time before."""
        self.until = now + pause_s(self.count)
        self.count += 1


class Backoff(msgspec.Struct):
    """Backoff of accounts, partitions, runs and time limits. All times are Unix times."""

    strikes: dict[tuple[str, str, str], Strikes] = msgspec.field(default_factory=dict, name="alone")
    "(partition or empty, account, QOS), or `_of_run` -> failures"
    lengths: dict[tuple[str, str, str], tuple[int, float]] = {}
    "(partition, account, QOS) -> (minutes that do not start, time until which this counts)"

    def strike(self, reason: str, asker: Asker, partition: str, minutes: int | None, now: float) -> bool:
        """Note a request that is refused or pending for this reason. Returns True if it should be withdrawn."""
        scope = scope_of(reason)
        if scope is Scope.NOTHING:
            return False
        if scope is Scope.LENGTH and minutes is not None and minutes > 1:
            # A limit of an account or a QOS binds nobody else.
            self.note_too_long(partition, minutes, now, asker if _OWNER.search(_plain(reason)) else ANYBODY)
            return True
        strikes = self.strikes.setdefault(_key(scope, asker, partition), Strikes())
        ended_at, newest = strikes.newest_vacancies
        # A request that waited before our last job ended says nothing about the capacity that this job freed.
        new_vacancies = min(strikes.vacancies, newest) if ended_at == now else 0
        if now >= strikes.until or new_vacancies < strikes.vacancies:
            strikes.add(now)
        strikes.tries, strikes.vacancies = 1, new_vacancies
        return True

    def put_off(self, what: str, now: float) -> None:
        """Back off from jobs of one run, whatever the cause. Other runs are not affected.

        Args:
            what: `base_job` or `harvest_jobs` of a run.
            now: Unix time.
        """
        self.strikes.setdefault(_of_run(what), Strikes()).add(now)

    def resume(self, what: str) -> None:
        """End the backoff from these jobs of a run: they work again, or somebody says so."""
        self.strikes.pop(_of_run(what), None)

    def put_off_until(self, what: str) -> float:
        """Unix time before which these jobs are not requested; 0: now."""
        return self.strikes.get(_of_run(what), Strikes()).until

    def note_too_long(self, partition: str, minutes: int, now: float, asker: Asker = ANYBODY) -> None:
        """Note that requests of so many minutes do not start in this partition for this account and QOS."""
        key = _key(Scope.LENGTH, asker, partition)
        bound_min, until = self.lengths.get(key, (minutes, 0.0))
        self.lengths[key] = (min(minutes, bound_min) if now < until else minutes, now + SHORTER_S)

    def note_started(self, asker: Asker, partition: str, now: float) -> None:
        """Note that a request has become a job. After a limit was reached, allow one more request: nobody knows how
        many fit.

        Requests for all idle nodes would leave all but a few pending, and again after every job that ends.
        """
        self.strikes.pop(_key(Scope.PARTITION, asker, partition), None)
        strikes = self._of(asker)
        if strikes.vacancies:
            strikes.vacancies -= 1
        else:
            strikes.count, strikes.tries = max(0, strikes.count - 1), strikes.tries + 1
            strikes.until = min(strikes.until, now)

    def note_ended_jobs(self, asker: Asker, now: float, jobs: int = 1) -> None:
        """Note that our jobs have ended: a limit of this account or QOS may admit as many new ones."""
        strikes = self._of(asker)
        strikes.vacancies += jobs
        strikes.newest_vacancies = now, jobs

    def request_limit(self, asker: Asker, now: float) -> int | None:
        """Number of requests that may wait for this account and QOS; None: no limit is known."""
        if _key(Scope.OWNER, asker, "") not in self.strikes:
            return None
        strikes = self._of(asker)
        return strikes.vacancies if now < strikes.until else max(strikes.vacancies, strikes.tries)

    def forget(self, asker: Asker) -> None:
        """End every backoff of this account and QOS: somebody says that the cause is gone."""
        name = asker.account, asker.qos
        self.strikes = {key: strikes for key, strikes in self.strikes.items() if key[1:] != name}
        self.lengths = {key: bound for key, bound in self.lengths.items() if key[1:] != name}

    def expire(self, now: float) -> None:
        """Cut every backoff to its maximum, also after a clock was set back.

        Drop each backoff that ended an hour ago, except those of accounts and QOS.
        """
        self.strikes = {key: s for key, s in self.strikes.items() if not key[0] or now < s.until + LONGEST_S}
        for strikes in self.strikes.values():
            strikes.until = min(strikes.until, now + LONGEST_S)
        for key, (minutes, until) in self.lengths.items():
            self.lengths[key] = (minutes, min(until, now + SHORTER_S))

    def until(self, asker: Asker, partition: str) -> float:
        """Unix time before which nothing is requested in this partition; 0: now."""
        return max(self.owner_until(asker), self.strikes.get(_key(Scope.PARTITION, asker, partition), Strikes()).until)

    def owner_until(self, asker: Asker) -> float:
        """Unix time before which nothing is requested for this account and QOS in any partition; 0: now."""
        strikes = self._of(asker)
        return 0.0 if strikes.vacancies else strikes.until

    def _of(self, asker: Asker) -> Strikes:
        return self.strikes.get(_key(Scope.OWNER, asker, ""), Strikes())

    def words(self, asker: Asker, partition: str, now: float) -> str:
        """The backoff in this partition in words; empty: none."""
        until, owner_until = self.until(asker, partition), self.owner_until(asker)
        if until <= now:
            return ""
        # A limit of the account binds in every partition: naming a partition would mislead.
        scope = f"under {asker}" if owner_until == until else f"in {partition}"
        return f"no requests {scope} for {until - now:.0f} s"

    def longest(self, asker: Asker, partition: str, now: float) -> int | None:
        """Maximum minutes of a request; None: no maximum is known."""
        bounds = (self.lengths.get(_key(Scope.LENGTH, whose, partition), (0, 0.0)) for whose in (asker, ANYBODY))
        return min((max(1, minutes // 2) for minutes, until in bounds if now < until), default=None)


def base_job(run: str) -> str:
    """Key of a run's base job, in place of a partition; no partition has such a name."""
    return f"base job of {run}"


def harvest_jobs(run: str) -> str:
    """Key of all harvest jobs of a run, in place of a partition."""
    return f"harvest jobs of {run}"


def _of_run(what: str) -> tuple[str, str, str]:
    """Key of `base_job` or `harvest_jobs`. It names no account, so that `forget` spares it."""
    return what, what, what


def _key(scope: Scope, asker: Asker, partition: str) -> tuple[str, str, str]:
    return ("" if scope is Scope.OWNER else partition, asker.account, asker.qos)
