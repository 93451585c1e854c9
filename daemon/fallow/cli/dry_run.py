"""`fallow submit --dry-run`: what would be asked for, and what it would find. Nothing is submitted."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fallow.cli.common import ask
from fallow.cli.tables import duration, moment
from fallow.model import AllocationKind, BaseStart, DryRun, FallowError, JobRequest, Prospect
from fallow.text import clean, clean_block

if TYPE_CHECKING:
    from fallow.core.submission.prepare import Submission
    from fallow.slurm.cli import CliClient

QUERY_S = 10.0
"""Slurm is not waited for longer: what would be submitted is known without it."""

REFUSED = 1
"""Exit code of sbatch when Slurm refuses a job; a real submission passes it on."""

_LONGEST = 1 << 24
"""Characters that are shown; Slurm takes no scripts that come near."""

NAME = "fallow-dry-run"
"""Job name for `sbatch --test-only`."""

# From 25.05 on with the cluster and a stray "a"; of heterogeneous jobs without "nodes".
_START = re.compile(r"to start at (\S+)(?: on cluster \S+)?(?: a)? using \d+ processors on (?:nodes )?(\S+)")


def dry_run(plan: Submission, source: Path | None) -> DryRun:
    """Everything about a submission short of doing it."""
    from fallow.config import load_config
    from fallow.core.accounting.backoff import Asker
    from fallow.core.submission.sbatch import harvest_options, job_environment
    from fallow.files import Paths
    from fallow.head.state.book import ordered

    settings = load_config()
    harvest, asker = settings.harvest, Asker.of(plan.spec, ordered(settings))
    variables = job_environment(str(Paths.default().state), "RUN", "RUN.base", AllocationKind.BASE)
    prospect, start, notes = asyncio.run(_slurm(plan, variables))
    asked = [each.partition for each in prospect.asks] if prospect is not None else []
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
    script = [str(source), *plan.line.args] if source is not None else []
    return DryRun(
        base=["sbatch", *plan.options("RUN.base", variables), *script],
        base_environment=variables,
        base_script=plan.spec.script,
        harvest=["sbatch", *options, "SCRIPT", *plan.line.args],
        harvest_script=plan.harvest_script,
        min_nodes=plan.spec.min_nodes,
        max_nodes=plan.spec.max_nodes,
        budget_node_hours=plan.spec.budget_node_hours,
        start=start,
        prospect=prospect,
        notes=notes,
    )


async def _slurm(plan: Submission, variables: dict[str, str]) -> tuple[Prospect | None, BaseStart | None, list[str]]:
    """What the head or, without one, Slurm sees now; when the base job would start; what could not be learned."""
    from fallow.slurm.cli import CliClient
    from fallow.slurm.client import SubmitRejected

    client = CliClient(query_timeout_s=QUERY_S, submit_timeout_s=QUERY_S)
    notes: list[str] = []
    prospect: Prospect | None = None
    start: BaseStart | None = None
    try:
        prospect = await asyncio.to_thread(_heads_view, plan)
        if prospect is None:
            prospect = await _own_view(client, plan)
    except FallowError as error:
        notes.append(f"what is idle now is not known: {error.message}")
    request = JobRequest(
        token=NAME,
        # The script is given as one, whatever it was made from.
        options=[word for word in plan.options("RUN.base", variables) if not word.startswith("--wrap")],
        script=plan.spec.script,
        args=list(plan.line.args),
        environment={**os.environ, **variables},
        cwd=plan.spec.cwd or "/",
    )
    try:
        start = base_start(await client.test_only(request))
    except SubmitRejected as refusal:
        start = BaseStart(says=f"refused: {refusal.reason}", refused=True)
    except FallowError as error:
        notes.append(f"when the base job would start is not known: {error.message}")
    return prospect, start, notes


def _heads_view(plan: Submission) -> Prospect | None:
    """None: there is no head, or it has not seen Slurm yet."""
    try:
        spec = msgspec.structs.replace(plan.spec, script="", environment={})
        return ask("prospect", Prospect, spec=msgspec.to_builtins(spec))
    except FallowError:
        return None


async def _own_view(client: CliClient, plan: Submission) -> Prospect:
    from fallow.config import load_config
    from fallow.core.neighbour.permission import at_first_sight
    from fallow.core.neighbour.preemption import as_for_us
    from fallow.core.planning.rules import Known
    from fallow.head.slurm.asking import Asking
    from fallow.head.slurm.estimate import estimate
    from fallow.head.state.book import ordered
    from fallow.slurm.state import own_groups

    known = Known()
    site = await client.config()
    settings = load_config()
    cluster = as_for_us(await client.poll("fallow-"), site, settings.harvest.qos)
    allowed = settings.site
    refused = at_first_sight(cluster, site, allow_unseen=allowed.harvest_unseen, allow_unfair=allowed.harvest_unfair)
    rules = Asking(settings, known, own_groups()).rules(cluster.at, site, refused)
    return estimate(cluster, plan.spec, rules, [], known, ordered=ordered(settings), by_head=False)


def base_start(says: str) -> BaseStart:
    """`Job 7 to start at 2026-01-31T12:00:00 using 4 processors on nodes n[1-2] in partition p` (local time)."""
    from fallow.slurm.parse import nodes

    found = _START.search(says)
    if found is None:
        return BaseStart(says=says)
    try:
        at = datetime.fromisoformat(found[1]).timestamp()
    except ValueError:
        return BaseStart(says=says)
    return BaseStart(says=says, start_at=at, nodes=nodes(found[2]))


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
    start, prospect = found.start, found.prospect
    if start is not None and start.start_at is not None:
        wait_s = start.start_at - now
        when = "at once" if wait_s < 1 else f"in {duration(wait_s)}, {moment(start.start_at)}"
        lines.append(f"the base job would start {when}, on {_folded(start.nodes)} (Slurm's estimate)")
    elif start is not None and start.refused:
        lines.append(f"the base job would be {start.says}; nothing would be submitted, and no run would begin")
    elif start is not None:
        lines.append(f"of the base job Slurm says: {start.says}")
    if prospect is not None:
        age_s = max(0.0, now - prospect.polled_at)
        seen = f"as the head saw {age_s:.0f} s ago" if prospect.by_head else "as Slurm says"
        lines.append(f"idle where nodes may be harvested: {_count(prospect.idle_nodes)}, {seen}")
        if start is None or not start.refused:
            asked = ", ".join(f"{_count(one.nodes)} for {one.minutes} min in {one.partition}" for one in prospect.asks)
            lines.append(f"asked for as soon as the base job trains: {asked or 'nothing'}")
            lines.append(
                f"nodes to be expected, base job included: {prospect.nodes} of {found.min_nodes} to {found.max_nodes}"
            )
        lines += prospect.notes
        if not prospect.by_head:
            lines.append("no head answers; start one before submitting: fallow daemon")
    if found.budget_node_hours is not None:
        lines.append(f"budget for all but the first base job: {found.budget_node_hours:g} node-hours")
    return lines + found.notes


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


def _folded(nodes: Sequence[str]) -> str:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    return str(NodeSet(",".join(nodes), resolver=RESOLVER_NOGROUP)) or "-"
