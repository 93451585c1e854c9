"""One HTML page of a simulation: plots, table and numbers in one file that asks nobody for anything."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from string import Template

import msgspec

from fallow.model import SimReport
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.plots import Plot
from fallow.sim.report import COLUMNS, days, foot, rows

AS_PIXELS = ("map",)
"""Plots whose SVG is a picture of pixels anyway."""

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; color: #23272e; background: #fff;
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
p.lead { font-size: 1.1rem; margin: 0 0 1.5rem; }
b { color: #15795a; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #d9dde3; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-size: .75rem; color: #5b6470; }
tbody tr:first-child { font-weight: bold; }
figure { margin: 2rem 0; }
figure img { width: 100%; height: auto; background: #fff; border-radius: .3rem; }
figcaption, .foot { color: #5b6470; font-size: .9rem; }
@media (prefers-color-scheme: dark) {
  body { color: #dfe3e8; background: #16191d; }
  b { color: #4cc79b; }
  th, figcaption, .foot { color: #a3acb8; }
  th, td { border-color: #3a3d42; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p class="lead">$lead</p>
<div class="scroll">
<table>
<thead><tr>$head</tr></thead>
<tbody>
$body
</tbody>
</table>
</div>
$figures
<ul class="foot">
$foot
</ul>
<p class="foot">$words</p>
<script type="application/json" id="report">$json</script>
</body>
</html>
""")

_WORDS = (
    "IDEAL: useful work, of what the same idle nodes would have done with free and instant rescaling. HARVESTED: of "
    "the idle node time, the part in which the node was a member of a training. ABSORBS, RELEASES, LOST: nodes that "
    "came, left in time, and were lost without notice, per day. DELAYED: jobs of others that waited for a node of "
    "ours, with the 95th percentile and the longest of their waits. RPCS/MIN: requests to slurmctld."
)


def page(found: SimReport, plots: Sequence[Plot], holes: HoleLengths) -> bytes:
    """The page in UTF-8. Nothing in it names a user, a path or a time of this machine."""
    title = f"{found.trace.name}: what its idle nodes could have trained"
    return _PAGE.substitute(
        title=escape(title),
        lead=_lead(found),
        head="".join(f"<th>{escape(name)}</th>" for name in COLUMNS),
        body="\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows(found)
        ),
        figures="\n".join(_figure(plot) for plot in plots),
        foot="\n".join(f"<li>{escape(line.strip())}</li>" for line in foot(found, holes)),
        words=escape(_WORDS),
        json=msgspec.json.format(msgspec.json.encode(found)).decode().replace("<", "\\u003c"),
    ).encode()


def _lead(found: SimReport) -> str:
    idle_nodes = found.idle_node_s / found.seconds if found.seconds else 0.0
    delayed = found.others_delayed
    others = (
        "no job of others waited for it"
        if not delayed.jobs
        else f"{delayed.jobs} jobs of others waited for it, at most {delayed.max_s:.1f} s"
    )
    return (
        f"In {days(found.seconds)}, {idle_nodes:.1f} nodes were idle on average. With {escape(found.policies[0].name)} "
        f"they do <b>{found.ideal_ratio:.1%}</b> of the work that they could do at best; {others}."
    )


def _figure(plot: Plot) -> str:
    kind, data = ("png", plot.png) if plot.name in AS_PIXELS else ("svg+xml", plot.svg)
    source, words = f"data:image/{kind};base64,{base64.b64encode(data).decode()}", escape(plot.caption)
    return f'<figure><img src="{source}" alt="{words}"><figcaption>{words}</figcaption></figure>'
