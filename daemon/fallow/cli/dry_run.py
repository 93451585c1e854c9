"""`fallow submit --dry-run`: the jobs that would be submitted, and the nodes that they would get. Submits nothing."""

import asyncio
import os
import shlex
import time
from pathlib import Path

import msgspec

from fallow.cli.common import ask
from fallow.config import load_config
from fallow.core.accounting.backoff import Asker
from fallow.core.submission.prepare import Submission
from fallow.core.submission.sbatch import harvest_options, job_environment
from fallow.files import Paths
from fallow.model import AllocationKind, BaseStart, DryRun, Estimate, FallowError, JobRequest
from fallow.text import clean, clean_block, counted

QUERY_S = 10.0
"""Time limit for Slurm's answer, in seconds. The commands and scripts are known without it."""

SBATCH_REFUSED = 1
"""Exit code of sbatch when Slurm refuses a job; a real submission passes it on."""

_MAX_CHARACTERS = 1 << 24
"""Most characters of the output; far more than the longest script that Slurm takes."""

NAME = "fallow-dry-run"
"""Job name for `sbatch --test-only`."""


def dry_run(plan: Submission, source: Path | None) -> DryRun:
    """Describe a submission without submitting it."""
    harvest = load_config().harvest
    asker = Asker.of(plan.spec, Asker(harvest.account or "", harvest.qos or ""))
    variables = job_environment(str(Paths.default().state), "RUN", "RUN.base", AllocationKind.BASE)
    notes: list[str] = []
    estimate, start = _estimate(plan, notes), _base_start(plan, variables, notes)
    planned_partitions = [each.partition for each in estimate.asks] if estimate is not None else []
    partitions = plan.spec.harvest_partitions or harvest.partitions or planned_partitions or ["PARTITION"]
    options = harvest_options(
        plan.spec,
        "RUN.harvest",
        partitions[0],
        harvest.max_minutes,
        "STATE/runs/RUN/logs/RUN.harvest.out",
        harvest.nice,
        qos=asker.qos,
        account=asker.account,
    )
    script = [str(source), *plan.spec.args] if source is not None else []
    return DryRun(
        base=["sbatch", *plan.options("RUN.base", variables), *script],
        base_environment=variables,
        base_script=plan.spec.script,
        harvest=["sbatch", *options, "SCRIPT", *plan.spec.args],
        harvest_script=plan.harvest_script,
        min_nodes=plan.spec.min_nodes,
        max_nodes=plan.spec.max_nodes,
        budget_node_hours=plan.spec.budget_node_hours,
        start=start,
        estimate=estimate,
        notes=notes,
    )


def _estimate(plan: Submission, notes: list[str]) -> Estimate | None:
    """What the run would find by the head's last poll; None, with a note: there is no head, or it has seen no Slurm."""
    spec = msgspec.structs.replace(plan.spec, script="", environment={})
    try:
        return ask("estimate", Estimate, spec=msgspec.to_builtins(spec))
    except FallowError as error:
        notes.append(f"what is idle now is not known: {error.message}")
        return None


def _base_start(plan: Submission, variables: dict[str, str], notes: list[str]) -> BaseStart | None:
    """When Slurm would start the base job. If Slurm does not say, adds a note and returns None."""
    from fallow.slurm.cli import CliClient
    from fallow.slurm.client import SubmitRejected

    request = JobRequest(
        token=NAME,
        # The script is passed as text, even if --wrap made it.
        options=[word for word in plan.all_options("RUN.base", variables) if not word.startswith("--wrap")],
        script=plan.spec.script,
        args=list(plan.spec.args),
        environment={**os.environ, **variables},
        cwd=plan.spec.cwd or "/",
    )
    try:
        return BaseStart(says=asyncio.run(CliClient(submit_timeout_s=QUERY_S).test_only(request)))
    except SubmitRejected as refusal:
        return BaseStart(says=f"refused: {refusal.reason}", refused=True)
    except FallowError as error:
        notes.append(f"when the base job would start is not known: {error.message}")
        return None


def show(result: DryRun) -> str:
    """Text for people: the commands and scripts, with control characters escaped, and all else as comments."""
    parts = [
        "# base job (RUN and its tokens are named by the head)",
        *(f"export {name}={shlex.quote(value)}" for name, value in result.base_environment.items()),
        shlex.join(result.base),
        "",
        "# its script",
        result.base_script.rstrip("\n"),
        "",
        f"# a harvest job ({result.min_nodes} to {result.max_nodes} nodes in all; minutes from the hole)",
        shlex.join(result.harvest),
        "",
        "# its script",
        result.harvest_script.rstrip("\n"),
        "",
        "# now",
        *(f"# {clean(line)}" for line in _now(result, time.time())),
    ]
    return clean_block("\n".join(parts), _MAX_CHARACTERS) + "\n"


def _now(result: DryRun, now: float) -> list[str]:
    lines: list[str] = []
    is_refused = result.start is not None and result.start.refused
    if result.start is not None and is_refused:
        lines.append(f"the base job would be {result.start.says}; nothing would be submitted, and no run would begin")
    elif result.start is not None:
        lines.append(f"Slurm about the base job: {result.start.says}")
    if (estimate := result.estimate) is not None:
        idle, age_s = counted(estimate.idle_nodes, "node"), max(0.0, now - estimate.polled_at)
        lines.append(f"idle where nodes may be harvested: {idle}, as the head saw {age_s:.0f} s ago")
        if not is_refused:
            asks = [f"{counted(one.nodes, 'node')} for {one.minutes} min in {one.partition}" for one in estimate.asks]
            lines.append(f"requests once the base job trains: {', '.join(asks) or 'nothing'}")
            expectation = f"{estimate.nodes} of {result.min_nodes} to {result.max_nodes}"
            lines.append(f"expected nodes, base job included: {expectation}")
        lines += estimate.notes
    if result.budget_node_hours is not None:
        lines.append(f"budget for all but the first base job: {result.budget_node_hours:g} node-hours")
    return lines + result.notes
