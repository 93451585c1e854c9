"""Slurm through its commands. They work with every version, and need only a working `squeue`.

One poll runs two processes: `scontrol`, which reads three `show` commands from its standard input, and `squeue`. On
22.05 and 25.11 that is six requests at slurmctld, two of them answered with "no change" (measured with sdiag). Commands
and traps: squeue(1), scontrol(1), sbatch(1), and `sbatch` messages in Slurm's slurm_errno.c.
"""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fallow.clock import steady
from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, JobInfo, JobRequest, OwnerView
from fallow.slurm import parse
from fallow.slurm.client import SlurmUnavailable, SubmitRejected, SubmitUnknown
from fallow.slurm.owner import owner
from fallow.slurm.process import NO_FOLDER, CommandResult, job_environment, query_environment, run
from fallow.slurm.state import cluster_state, on_our_clock, user_name

QUERY_TIMEOUT_S = 30.0
"A hung slurmctld holds scontrol for 20 s (two tries of MessageTimeout=10); a busy one may need as long."
SUBMIT_TIMEOUT_S = 60.0
POLL_REQUESTS = 6
"As sdiag of 22.05 counts a poll: nodes, partitions (three times), jobs, reservations. pyslurm sends as many."
ACCOUNTING_TIMEOUT_S = 5.0
"Polls wait for this answer. slurmdbd may be unavailable while slurmctld works."

_SHOW = "show node\nshow partition\nshow reservation\n"
# A site may have these commands show all clusters of its federation (FederationParameters=fed_display).
_SQUEUE = ["squeue", "-h", "-a", "--local", "-t", "all"]
# Below that, the difference is the time an answer takes and Slurm's rounding to whole seconds.
_CLOCK_TOLERANCE_S = 2.0
_JOB_ID = re.compile(r"\d+(?:[+_]\d+)?")


class CliClient:
    """`SlurmClient` over Slurm's commands.

    Args:
        conf: the slurm.conf to use; None: as the environment says.
        why: reason for using the commands, shown in `backend`.
    """

    poll_requests = POLL_REQUESTS
    start_s = 0.0

    def __init__(
        self,
        conf: Path | None = None,
        *,
        query_timeout_s: float = QUERY_TIMEOUT_S,
        submit_timeout_s: float = SUBMIT_TIMEOUT_S,
        why: str = "",
    ) -> None:
        self.conf = str(conf) if conf else os.environ.get("SLURM_CONF")
        self.backend = f"command line ({why})" if why else "command line"
        self._query_timeout_s = query_timeout_s
        self._submit_timeout_s = submit_timeout_s
        self.clock_offset_s = 0.0
        "seconds by which slurmctld's clock is ahead of ours"
        self._qos: str | None = None
        "the accounting's last answer about which QOS preempt which"

    async def config(self) -> ClusterConfig:
        asked_at = steady()
        config, as_of = parse.config(await self._query(["scontrol", "show", "config"]))
        half_s = (steady() - asked_at) / 2
        if config.preempt_type:
            qos, unknown = await self._ask_qos(config)
            config = msgspec.structs.replace(parse.with_qos(config, qos), qos_unknown=unknown)
        offset = 0.0 if as_of is None else as_of - asked_at - half_s
        # A busy slurmctld may have answered at any time since the question.
        self.clock_offset_s = offset if abs(offset) > _CLOCK_TOLERANCE_S + half_s else 0.0
        return config

    async def poll(self) -> ClusterState:
        nonce = secrets.token_hex(4)
        answers = await asyncio.gather(
            self._show(),
            self._query([*_SQUEUE, "-O", parse.job_format(nonce)]),
            return_exceptions=True,  # both have ended before either's error is raised
        )
        cluster, queue = (_unwrap(answer) for answer in answers)
        at = steady()
        # In a thread: of ten thousand nodes and jobs this takes a good part of a second.
        return await asyncio.to_thread(self._state, at, cluster, queue, nonce)

    async def submit(self, request: JobRequest) -> str:
        result = await self._sbatch(request, ["--parsable"])
        if result.code == 0:
            if job_id := parse.submitted_id(result.stdout):
                return job_id
            raise SubmitUnknown(request.token, f"sbatch printed no job id: {result.stdout[-200:]!r}")
        is_refused = result.code is not None and result.code > 0 and parse.is_refusal(result.stderr)
        raise (SubmitRejected if is_refused else SubmitUnknown)(request.token, parse.complaint(result.stderr))

    async def own_jobs(self) -> list[JobInfo]:
        """The user's own jobs in all states that Slurm remembers. Their times are on slurmctld's clock."""
        # slurmctld filters by user (but not if the user is root).
        nonce = secrets.token_hex(4)
        text = await self._query([*_SQUEUE, f"--user={os.getuid()}", "-O", parse.job_format(nonce)])
        return parse.jobs(text, nonce)

    async def cancel(self, job_ids: Sequence[str]) -> None:
        if not job_ids:
            return
        for text in job_ids:
            if not _JOB_ID.fullmatch(text):
                raise FallowError(f"{text!r} is not a job id; give the number that sbatch printed", Exit.USAGE)
        result = await self._start(["scancel", "--quiet", *job_ids])
        # scancel also fails for a job that has ended, which is what the caller wants.
        if result.code != 0 and not re.search(r"invalid job id|already complet", result.stderr, re.IGNORECASE):
            raise SlurmUnavailable(_failure(["scancel"], result))

    async def owner(self) -> OwnerView:
        return await owner(self._query, user_name(os.getuid()), steady())

    async def test_only(self, request: JobRequest) -> str:
        result = await self._sbatch(request, ["--test-only"])
        if result.code == 0:
            return parse.complaint(result.stderr)
        if result.code is not None and parse.is_refusal(result.stderr):
            raise SubmitRejected(request.token, parse.complaint(result.stderr))
        raise SlurmUnavailable(_failure(["sbatch", "--test-only"], result))

    def _state(self, at: float, cluster: str, queue: str, nonce: str) -> ClusterState:
        nodes, partitions, reservations = parse.cluster(cluster)
        if not nodes:
            # PrivateData=nodes, or an output of a shape that we do not know
            raise SlurmUnavailable("scontrol show node: Slurm shows no nodes; ask the site about PrivateData")
        state = cluster_state(nodes, partitions, reservations, parse.jobs(queue, nonce), at=at)
        return on_our_clock(state, at, self.clock_offset_s)

    async def _ask_qos(self, config: ClusterConfig) -> tuple[str, bool]:
        """Ask the accounting which QOS preempt which, or use its last answer.

        Returns:
            The text, empty without accounting; and True if the accounting has not answered yet, so that nothing is
                known.
        """
        timeout_s = min(ACCOUNTING_TIMEOUT_S, self._query_timeout_s)
        try:
            self._qos = await self._query(
                ["sacctmgr", "-n", "-P", "show", "qos", f"format={parse.QOS_COLUMNS}"], timeout_s
            )
        except SlurmUnavailable:
            if not config.accounting:
                return "", False
        return self._qos or "", self._qos is None

    # -- processes ----------------------------------------------------------------------------------------------

    async def _show(self) -> str:
        argv = ["scontrol", "-o", "-d", "-a", "--local"]
        result = await self._start(argv, _SHOW)
        # A site may hide its reservations (PrivateData); the rest of the answer is good.
        hidden = result.code is not None and re.search(r"slurm_load_reservations.*denied", result.stderr)
        if result.code != 0 and not (hidden and result.stderr.count("error") == 1):
            raise SlurmUnavailable(_failure(argv, result))
        return result.stdout

    async def _query(self, argv: list[str], timeout_s: float | None = None) -> str:
        result = await self._start(argv, timeout_s=timeout_s)
        if result.code != 0:
            raise SlurmUnavailable(_failure(argv, result))
        return result.stdout

    async def _start(self, argv: list[str], stdin: str = "", timeout_s: float | None = None) -> CommandResult:
        limit_s = self._query_timeout_s if timeout_s is None else timeout_s
        with _start_errors(argv[0]):
            return await run(argv, environment=query_environment(self.conf), timeout_s=limit_s, stdin=stdin)

    async def _sbatch(self, request: JobRequest, options: list[str]) -> CommandResult:
        # The token first: for a heterogeneous job (`A : B`) the first component's name reaches all of them.
        user_options = [option for option in request.options if not option.startswith(("--job-name", "-J"))]
        script = _script_file(request.script.encode(errors="surrogateescape"))
        argv = ["sbatch", *options, f"--job-name={request.token}", *user_options, str(script), *request.args]
        environment, cwd = job_environment(request.environment, self.conf), Path(request.cwd)
        try:
            with _start_errors("sbatch"):
                result = await run(
                    argv, environment=environment, timeout_s=self._submit_timeout_s, cwd=cwd, umask=request.umask
                )
        finally:
            # Somebody may have removed the file; that says nothing about the job.
            with contextlib.suppress(OSError):
                script.unlink()
        if result.code == NO_FOLDER:
            raise SubmitRejected(request.token, f"its working folder: {parse.complaint(result.stderr)}")
        return result


@contextlib.contextmanager
def _start_errors(command: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hangs = error.errno == errno.ETIMEDOUT
        advice = "try again when it answers" if hangs else "install Slurm's client commands or set PATH"
        raise SlurmUnavailable(f"{command} cannot be started ({error.strerror}); {advice}") from error


def _script_file(text: bytes) -> Path:
    """Write a batch script to a file that only this user can read. sbatch accepts arguments only for a file, not for
    standard input.

    Raises:
        SlurmUnavailable: the file cannot be written; nothing was submitted.
    """
    try:
        fd, name = tempfile.mkstemp(prefix="fallow-", suffix=".sh")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        # gettempdir() itself raises where no folder can be written to.
        folder = Path(error.filename).parent if error.filename else tempfile.tempdir or "the temporary folder"
        raise SlurmUnavailable(
            f"sbatch: cannot write its script to {folder} ({error.strerror or error}); "
            "make room there, or start the head with TMPDIR set to another folder"
        ) from error
    return Path(name)


def _unwrap(result: str | BaseException) -> str:
    if isinstance(result, BaseException):
        raise result
    return result


def _failure(argv: list[str], result: CommandResult) -> str:
    command = " ".join(argv[:3]) if argv[0] == "scontrol" and argv[1] == "show" else argv[0]
    return f"{command}: {parse.complaint(result.stderr)}; check slurmctld with `scontrol ping`"
