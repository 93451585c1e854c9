"""The demo's report: the JSON of DESIGN section 6, and the table that people read."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fallow.model import DelayReport, Quantiles, RunReport, RunStatus, Struct


class SlurmFacts(Struct, frozen=True):
    version: str
    nodes: int


class DemoReport(RunReport, frozen=True, kw_only=True):
    """The run's report, and what only the demo knows."""

    slurm: SlurmFacts
    static_digest: str | None
    static_loss: float | None
    hole_to_step_s: Quantiles
    idle_node_s: float
    harvested_node_s: float
    others_delayed: DelayReport
    slurmctld_rpcs_per_min: float
    released_late: int
    "nodes whose job ended before they had left the training"
    seconds: float

    @property
    def shortfalls(self) -> list[str]:
        """What a reader must know before believing the rest, in words."""
        out = []
        if self.status is not RunStatus.FINISHED:
            out.append(f"the training did not finish: it is {self.status} ({self.message or 'no message'})")
        if self.samples.lost or self.samples.duplicated:
            out.append(f"{self.samples.lost} samples lost, {self.samples.duplicated} repeated")
        if self.static_loss is None:
            out.append("the undisturbed run did not finish, so there is nothing to compare with")
        if self.released_late:
            out.append(f"{self.released_late} nodes were taken away before the training had left them")
        changes = [g for g in self.generations if g.kind.value != "start"]
        if not changes:
            out.append("the membership never changed: the run was too short for the cluster's holes")
        return out


def to_table(report: DemoReport) -> Group:
    table = Table(
        title=f"Slurm {report.slurm.version}, {report.slurm.nodes} nodes, {report.seconds:.0f} s", show_header=False
    )
    table.add_column(justify="right", style="bold")
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(value))

    kinds = [g.kind.value for g in report.generations]
    row("steps", f"{report.steps}, in {len(report.generations)} generations, the same processes throughout")
    row("membership changes", ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds)))
    row("samples", f"{report.samples.consumed} used, {report.samples.lost} lost, {report.samples.duplicated} repeated")
    row("planned pause", _seconds(report.pause_s.planned))
    row("after a loss", _seconds(report.pause_s.unplanned))
    row("hole to first useful step", _seconds(report.hole_to_step_s))
    share = report.harvested_node_s / report.idle_node_s if report.idle_node_s else 0.0
    row("idle node time used", f"{report.harvested_node_s:.0f} of {report.idle_node_s:.0f} node-seconds ({share:.0%})")
    delay = report.others_delayed
    row("others delayed by us", f"{delay.jobs} jobs, p95 {delay.p95_s:.1f} s, at most {delay.max_s:.1f} s")
    row("slurmctld requests", f"{report.slurmctld_rpcs_per_min:.1f} per minute")
    row(
        "final loss",
        f"{_loss(report.final_loss)}; undisturbed on one node {_loss(report.static_loss)}{_difference(report)}",
    )
    row("final state", f"{(report.final_digest or '-')[:16]}; undisturbed {(report.static_digest or '-')[:16]}")
    notes = [Text(f"fell short: {line}", style="red") for line in report.shortfalls]
    return Group(table, *notes)


def _seconds(q: Quantiles) -> str:
    if q.p50 is None or q.p95 is None:
        return "none happened"
    return f"p50 {q.p50:.3f} s, p95 {q.p95:.3f} s, longest {q.max or q.p95:.3f} s"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _difference(report: DemoReport) -> str:
    if report.final_loss is None or report.static_loss is None:
        return ""
    return f" (difference {abs(report.final_loss - report.static_loss):.2e})"
