"""The page of `fallow report --html`: one file without scripts, which loads nothing. Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, tzinfo
from itertools import chain

from fallow.core.page import drawing
from fallow.core.page.drawing import Markup, TimeAxis, mark, moment, rows_of, span, tag
from fallow.core.page.history import Change, Stay, history_of
from fallow.model import AllocationKind, ChangeKind, EventRecord, RunReport, Snapshot, UsageReport
from fallow.text import counted

MOST_ROWS, MOST_STAYS, MOST_CHANGES = 80, 2000, 300
"""Most rows and stays in the drawing of nodes, and changes in the table: the page of a long run stays small."""

HEAD = """<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/><style>
:root{color-scheme:light dark;--bg:#fff;--ink:#17202a;--soft:#5a6675;--line:#dde3ea;--card:#f4f6f9;--bad:#c0341d;
--base:#2c6cb8;--harvest:#168a5e;--other:#8a94a0}@media screen and (prefers-color-scheme:dark){:root{--bg:#11161c;
--ink:#e8edf2;--soft:#9eabb8;--line:#2b3540;--card:#1a222b;--bad:#ff8d78;--base:#6aa5ec;--harvest:#45c795}}*{
box-sizing:border-box;print-color-adjust:exact;-webkit-print-color-adjust:exact}body{margin:0 auto;max-width:1060px;
padding:2rem 1.25rem;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,"Segoe UI","Noto Sans",sans-serif}
h1{margin:0;font-size:2rem;line-height:1.2}h2{margin:2.6rem 0 .6rem;font-size:1.2rem}p{margin:.5rem 0}li{
max-width:80ch}h1,p,td,dd{overflow-wrap:anywhere}.soft{color:var(--soft);font-size:.9rem}.lead{font-size:1.25rem;
margin:1.2rem 0}.state{border:1.5px solid;border-radius:1em;padding:0 .7em;margin-right:.5em}.failed,.cancelled{
color:var(--bad)}.finished{color:var(--harvest)}.training{color:var(--base)}dl{display:grid;gap:.75rem;
margin:1.5rem 0;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr))}dl div{background:var(--card);
border-radius:.6rem;padding:.8rem 1rem}dd,dt{margin:0;font-size:.85rem;color:var(--soft)}dt+dd{font-size:1.35rem;
font-weight:600;color:var(--ink)}.wide{overflow-x:auto}svg{display:block;width:100%;min-width:660px;height:auto;
font-size:12px}svg text{fill:var(--ink)}.grid{stroke:var(--line)}.base{fill:var(--base);stroke:var(--base)}.harvest{
fill:url(#hatch);stroke:var(--harvest)}.other{fill:var(--card);stroke:var(--other);stroke-dasharray:3 2}.mark{
fill:var(--ink);stroke:var(--bg);stroke-width:1.5;paint-order:stroke}.eject{stroke:var(--bad);stroke-width:2.2;
fill:none}.key span{display:inline-flex;align-items:center;gap:.45rem;margin-right:1.4rem;font-size:.9rem}.key svg,
.hatch{min-width:0;width:22px}.hatch{position:absolute;height:0}table{border-collapse:collapse;width:100%;
font-size:.88rem}th,td{text-align:left;vertical-align:top;padding:.4rem .9rem .4rem 0;
border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}td{white-space:nowrap}td:nth-child(4),
td:nth-child(5),td:last-child{white-space:normal}td:last-child{min-width:15rem}@media print{body{padding:0;
font-size:11pt}.wide{overflow:visible}svg{min-width:0}h2{break-after:avoid}tr,dl div{break-inside:avoid}table{
font-size:8pt}}</style>"""
HATCH = """<svg class="hatch" aria-hidden="true"><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><rect width="5" height="5" fill="var(--bg)"/><rect width="5" height="5" opacity=".35"
fill="var(--harvest)"/><rect width="2.5" height="5" fill="var(--harvest)"/></pattern></svg>"""
KEY = {"base": "base job", "harvest": "harvested node, else idle", "other": "kind not on record"}
KEY |= {"absorb": "joined", "release": "given back", "eject": "lost"}
HOW_TO_READ = """A bar is the time for which a node computed with the others. Point at a bar or a mark to see why.
In a pause no member computes, because the members change. A planned pause follows a decision, an unplanned one a loss.
If 0 samples are lost and 0 duplicated, the training used its data as if its members had never changed.
The digest is a checksum of the final weights: trainings with the same digest have the same weights."""
COLUMNS = ("generation", "change", "members", "joined", "left", "first step", "pause", "when", "why")


def page_of(
    report: RunReport, snapshot: Snapshot, usage: UsageReport, events: Sequence[EventRecord], zone: tzinfo | None = None
) -> str:
    """Make the page about one run from what the head tells about it; zone None: the time zone of this machine."""
    view, status = snapshot.runs[0], report.status
    end_at, stays, changes = history_of(report, view, events, snapshot.at)
    begin_at = min([end_at, view.created_at or end_at, *(stay.joined_at for stay in stays)])
    times = f"{report.run}, from {moment(begin_at, zone)} ({moment(begin_at, UTC, '%H:%M:%S UTC')}) "
    times += f"{'to' if status.ended else 'until now,'} {moment(end_at, zone)}, {span(end_at - begin_at)}"
    state = tag("span", status.value, class_=f"state {status.value}")
    body = [tag("h1", view.name or report.run), tag("p", state, times, class_="soft")]
    body += [*_summary(report, stays, usage), tag("h2", "Nodes over time")]
    axis = TimeAxis(begin_at, end_at, zone)
    body += _drawings(report, stays, axis) if stays else [tag("p", "No node has been a member yet.")]
    rows = [_row(change, zone) for change in changes]
    if len(rows) > MOST_CHANGES:
        note = f"{len(rows) - MOST_CHANGES} changes are left out; see: fallow report {report.run}"
        rows[MOST_CHANGES // 2 : -MOST_CHANGES // 2] = [["…"] * (len(COLUMNS) - 1) + [note]]
    body += [tag("h2", "Changes, and why"), _table(COLUMNS, rows), tag("h2", "How to read this page")]
    body.append(tag("ul", *(tag("li", line) for line in HOW_TO_READ.split("\n"))))
    body.append(tag("p", f"Made by Fallow {snapshot.head.version}, {moment(snapshot.at, zone)}", class_="soft"))
    head = tag("head", Markup(HEAD), tag("title", f"{view.name or report.run}: Fallow"))
    page = tag("html", head, tag("body", Markup(HATCH), *body), lang="en")
    # Right in every encoding of standard output.
    return f"<!DOCTYPE html>\n{page}\n".encode("ascii", "xmlcharrefreplace").decode()


def _summary(report: RunReport, stays: Sequence[Stay], usage: UsageReport) -> Iterator[Markup]:
    """A sentence for everybody, and the figures."""
    seconds = dict.fromkeys(drawing.KINDS, 0.0)
    for stay in stays:
        seconds[stay.kind] += stay.left_at - stay.joined_at
    node_s, idle_s = sum(seconds.values()), seconds[AllocationKind.HARVEST]
    if accounted_s := usage.total.base.node_s + usage.total.harvested.node_s:
        node_s, idle_s = accounted_s, usage.total.harvested.node_s
    scale, unit = (3600, "node-hours") if node_s >= 3600 else (60, "node-minutes")
    total, idle, wasted = (f"{s / scale:,.1f}" for s in (node_s, idle_s, usage.total.wasted.node_s))
    idle = "an unknown part" if seconds[None] and not accounted_s else idle
    restarts = sum(generation.kind is ChangeKind.START for generation in report.generations) - 1
    text = f"; it was restarted {counted(restarts, 'time')}" if restarts else "; it was never restarted"
    # A run in restart mode reports no steps. Of a very long run the first generations are no longer on record.
    if not report.steps or restarts < 0 or report.generations[0].first_step:
        text = ""
    text = f"This training used {total} {unit}, {idle} of them on nodes that would have been idle{text}."
    yield from (tag("p", text, class_="lead"), tag("p", report.message))
    samples, delays = report.samples, usage.others_delayed
    unknown = f", {samples.unknown:,} unknown" * bool(samples.unknown)
    pause_s = sum(generation.pause_s or 0.0 for generation in report.generations)
    loss = "-" if report.final_loss is None else f"{report.final_loss:.4g}"
    figures: list[tuple[str, ...]] = [
        ("steps", f"{report.steps:,}", f"{report.steps_discarded:,} repeated after losses"),
        ("samples", f"{samples.consumed:,}", f"{samples.lost:,} lost, {samples.duplicated:,} duplicated{unknown}"),
        ("final loss", loss),
        (unit, total, f"{idle} harvested" + f", {wasted} more wasted" * bool(accounted_s)),
        ("generations", f"{len(report.generations):,}", f"stood still for {span(pause_s)} in all"),
    ]
    if delays is not None:
        longest = f", up to {span(delays.max_s)}" * bool(delays.jobs)
        figures.append(("others' jobs delayed", f"{delays.jobs}", f"by all runs of this user{longest}"))
    yield tag("dl", *(tag("div", tag("dt", name), *(tag("dd", cell) for cell in cells)) for name, *cells in figures))
    yield tag("p", "digest of the final weights ", tag("code", report.final_digest or "-"), class_="soft")


def _drawings(report: RunReport, stays: Sequence[Stay], axis: TimeAxis) -> Iterator[Markup]:
    for kind, text in KEY.items():
        sign = mark(kind, 11, 7) if kind in drawing.MARKS else tag("rect", class_=kind, x=1, y=2, width=20, height=10)
        yield tag("span", tag("span", tag("svg", sign, viewBox="0 0 22 14"), text), class_="key")
    every = rows_of(stays)
    chosen = sorted(every, key=lambda row: -sum(stay.left_at - stay.joined_at for stay in row))[:MOST_ROWS]
    longest = sorted(chain(*chosen), key=lambda stay: stay.joined_at - stay.left_at)[:MOST_STAYS]
    yield drawing.timeline(axis, rows_of(sorted(longest, key=lambda stay: stay.joined_at)))
    if len(longest) < len(stays):
        text = f"Only a part is drawn: the {len(chosen)} rows with most time of {len(every)}, "
        yield tag("p", f"{text}and the {len(longest)} longest stays of {len(stays)}.", class_="soft")
    yield from (tag("h2", "Members over time"), drawing.member_count(axis, stays), tag("h2", "Pauses"))
    kinds = (("planned", report.pause_s.planned), ("unplanned", report.pause_s.unplanned))
    cells = [[name, span(pause.p50), span(pause.p95), span(pause.max)] for name, pause in kinds]
    yield _table(("pause", "median (p50)", "95 % are shorter (p95)", "longest"), cells)
    if measured := [one for one in report.generations if one.pause_s and one.kind is not ChangeKind.START]:
        yield drawing.pauses(measured)


def _row(change: Change, zone: tzinfo | None) -> list[str]:
    turn, count, *names = change
    row = [str(turn.kind), str(count), *map(", ".join, names)]
    if isinstance(turn, EventRecord):
        return ["-", *row, "-", "-", moment(turn.at, zone), turn.text]
    step, pause = str(turn.first_step or 0), span(turn.pause_s)
    return [str(turn.generation), *row, step, pause, moment(turn.at, zone), turn.reason]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("tr", *(tag("th", column) for column in columns))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide", tabindex="0")
