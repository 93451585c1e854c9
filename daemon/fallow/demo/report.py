"""Output of the demo: meanwhile members, step, loss and each change with its reason; at the end the report.

The report is a table, or the JSON of DESIGN section 6.
"""

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fallow.model import (
    DelayReport,
    EventRecord,
    NodeOwner,
    Quantiles,
    RunReport,
    RunStatus,
    RunView,
    Snapshot,
    Struct,
)
from fallow.text import clean

GLYPHS = {
    NodeOwner.IDLE: (".", "dim"),
    NodeOwner.OTHERS: ("x", "yellow"),
    NodeOwner.PLANNED: ("p", "magenta"),
    NodeOwner.DOWN: ("!", "red"),
    NodeOwner.OURS: ("#", "green"),
}
QUIET = frozenset(("job", "dismiss", "limit", "checkpoint", "slurm"))
"""Kinds of events that are not shown."""

HEARTBEAT_S = 10.0
"""Seconds between lines of progress if standard error is no terminal."""


class LiveView:
    """Prints events on standard error. A terminal also shows the current state, below the events."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._began_at = time.monotonic()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._printed_at = 0.0

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(
            f"{time.monotonic() - self._began_at:6.1f} s  {clean(text)}", markup=False, highlight=False, soft_wrap=True
        )

    def show(self, item: Snapshot | EventRecord) -> None:
        if isinstance(item, EventRecord):
            if item.kind not in QUIET:
                self.say(item.text)
        elif self._console.is_terminal:
            self._live.update(_picture(item))
        elif item.runs and time.monotonic() - self._printed_at > HEARTBEAT_S:
            self._printed_at = time.monotonic()
            self.say(_progress(item.runs[0]))


def _picture(snapshot: Snapshot) -> Group:
    parts: list[Text | Padding] = []
    for run in snapshot.runs[:1]:
        parts.append(Text(_progress(run), style="bold"))
        # A ProgressBar does not end its line; Padding does.
        parts.append(Padding(ProgressBar(total=run.total_steps or 100, completed=run.step, width=70), 0))
    nodes = ((node.node, *GLYPHS[node.owner]) for node in snapshot.nodes)
    parts.append(Text(" ").join(Text(f"{name}:{sign}", style=style) for name, sign, style in nodes))
    return Group(*parts, Text("# training   x others   . idle   p planned for others", style="dim"))


def _progress(run: RunView) -> str:
    loss = "-" if run.loss is None else f"{run.loss:.4f}"
    return (
        f"step {run.step}/{run.total_steps or '?'}  loss {loss}  {run.samples_per_s:.1f} samples/s  "
        f"{len(run.training)} members: {' '.join(sorted(m.node for m in run.training))}"
    )


# -- the report -------------------------------------------------------------------------------------------------------


class SlurmFacts(Struct, frozen=True):
    version: str
    nodes: int


class DemoReport(RunReport, frozen=True, kw_only=True):
    """The run's report with the figures of the demo."""

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
        """Sentences on what went wrong, which a reader must know before believing the figures."""
        reasons = []
        if self.status is not RunStatus.FINISHED:
            reasons.append(f"the training did not finish: it is {self.status} ({self.message or 'no message'})")
        if self.samples.lost or self.samples.duplicated:
            reasons.append(f"{self.samples.lost} samples lost, {self.samples.duplicated} repeated")
        if self.static_loss is None:
            reasons.append("the undisturbed run did not finish, so there is nothing to compare with")
        if self.released_late:
            reasons.append(f"{self.released_late} nodes were taken away before the training had left them")
        changes = [g for g in self.generations if g.kind.value != "start"]
        if not changes:
            reasons.append("the membership never changed: the run was too short for the cluster's holes")
        return reasons


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
