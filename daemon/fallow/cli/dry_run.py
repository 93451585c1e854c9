"""`fallow submit --dry-run`: what would be asked for, and what it would find. Nothing is submitted."""

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
"""Slurm is not waited for longer: what would be submitted is known without it."""

REFUSED = 1
"""Exit code of sbatch when Slurm refuses a job; a real submission passes it on."""

_LONGEST = 1 << 24
"""Characters that are shown; Slurm takes no scripts that come near."""

NAME = "fallow-dry-run"
"""Job name for `sbatch --test-only`."""


def dry_run(plan: Submission, source: Path | None) -> DryRun:
    """Everything about a submission short of doing it."""
    harvest = load_config().harvest
    asker = Asker.of(plan.spec, Asker(harvest.account or "", harvest.qos or ""))
    variables = job_environment(str(Paths.default().state), "RUN", "RUN.base", AllocationKind.BASE)
    notes: list[str] = []
    estimate, start = _estimate(plan, notes), _base_start(plan, variables, notes)
    asked = [each.partition for each in estimate.asks] if estimate is not None else []
    partitions = plan.spec.harvest_partitions or harvest.partitions or asked or ["PARTITION"]
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
    """When Slurm would start the base job; None, with a note: it does not say."""
    from fallow.slurm.cli import CliClient
    from fallow.slurm.client import SubmitRejected

    request = JobRequest(
        token=NAME,
        # The script is given as one, whatever it was made from.
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


def show(found: DryRun) -> str:
    """For people: commands and scripts as they are, but for what a terminal would obey; the rest as comments."""
    parts = [
        "# base job (RUN and its tokens are named by the head)",
        *(f"export {name}={shlex.quote(value)}" for name, value in found.base_environment.items()),
        shlex.join(found.base),
        "",
        "# its script",
        found.base_script.rstrip("\n"),
        "",
        f"# a harvest job ({found.min_nodes} to {found.max_nodes} nodes in all; minutes from the hole)",
        shlex.join(found.harvest),
        "",
        "# its script",
        found.harvest_script.rstrip("\n"),
        "",
        "# now",
        *(f"# {clean(line)}" for line in _now(found, time.time())),
    ]
    return clean_block("\n".join(parts), _LONGEST) + "\n"


def _now(found: DryRun, now: float) -> list[str]:
    lines: list[str] = []
    refused = found.start is not None and found.start.refused
    if found.start is not None and refused:
        lines.append(f"the base job would be {found.start.says}; nothing would be submitted, and no run would begin")
    elif found.start is not None:
        lines.append(f"of the base job Slurm says: {found.start.says}")
    if (estimate := found.estimate) is not None:
        idle, age_s = counted(estimate.idle_nodes, "node"), max(0.0, now - estimate.polled_at)
        lines.append(f"idle where nodes may be harvested: {idle}, as the head saw {age_s:.0f} s ago")
        if not refused:
            asks = [f"{counted(one.nodes, 'node')} for {one.minutes} min in {one.partition}" for one in estimate.asks]
            lines.append(f"asked for as soon as the base job trains: {', '.join(asks) or 'nothing'}")
            most = f"{estimate.nodes} of {found.min_nodes} to {found.max_nodes}"
            lines.append(f"nodes to be expected, base job included: {most}")
        lines += estimate.notes
    if found.budget_node_hours is not None:
        lines.append(f"budget for all but the first base job: {found.budget_node_hours:g} node-hours")
    return lines + found.notes
