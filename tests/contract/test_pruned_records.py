"""Records of ended runs go, and what they used stays known: in memory and in the store."""

import itertools
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest

from fallow.config import Config, Prune, Usage
from fallow.core import records
from fallow.core.accounting.spans import Span, Use
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.files import Paths
from fallow.head import deadlines
from fallow.head.api.pruning import DAY_S, EVERY_S, Pruning
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import GIVE_UP_AFTER
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts
from fallow.head.state.registry import Registry, Run
from fallow.head.state.stored import PRUNED, PrunedRuns
from fallow.model import AllocationKind, AllocationState, RunSpec, RunStatus, UsageRow
from fallow.store.client import Write
from head_in_process import serving
from runs import finish

KEEP, OLD_DAYS = 5, 3.0
RUNS = 200
PRICES = Usage(node_hour={"*": 3600.0})


class Desk:
    """A head's book, its pruning and its store."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths(state=folder / "s", runtime=folder / "r").create()
        self.numbers = itertools.count()
        self.now = 1000 * DAY_S
        self.at = 0.0
        self.durable: Durable
        self.book: Registry
        self.pruning: Pruning

    async def __aenter__(self) -> "Desk":
        """Begin as a new head."""
        self.durable = Durable(self.paths, None)
        await self.durable.open()
        await self.durable.begin_term()
        self.book = Registry(self.paths, Config(), lambda: f"{next(self.numbers):06}")
        await self.durable.load(self.book, self.at)
        if PRUNED in self.durable.notes:
            self.book.pruned = records.decode(self.durable.notes[PRUNED], PrunedRuns)
        self.pruning = Pruning(Prune(keep=KEEP, older_than_days=OLD_DAYS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.durable.close()

    def turn(self) -> Turn:
        return Turn(self.book, self.at, self.now)

    async def end_a_run(self, account: str, node_s: float) -> Run:
        """Create a run that has had one node for so long, and let it end."""
        options = [f"--account={account}"]
        spec = RunSpec(run="", name="r", min_nodes=1, max_nodes=2, sbatch_options=options, harvest_options=options)
        run = self.book.add(self.book.draft(spec, self.now), 0, self.at)
        span = Span(nodes={"n1": 2}, start_at=self.now - node_s, end_at=self.now, partition="p")
        use = Use(first_at=self.now - node_s, last_at=self.now, member_s=node_s)
        run.allocations["t"] = Allocation(
            token="t",
            run=run.id,
            kind=AllocationKind.HARVEST,
            public_key="k",
            state=AllocationState.ENDED,
            is_settled=True,
            spans={"7": span},
            uses={"n1": use},
        )
        turn = self.turn()
        turn.apply(run, ev.Cancel(at=self.at, reason="it is over", status=RunStatus.FINISHED))
        accounts.settle(turn, self.now)
        await self.durable.write(turn)
        return run

    async def tick(self) -> None:
        turn = self.turn()
        self.pruning.tick(turn)
        if self.pruning.scan is not None:
            wait([self.pruning.scan])
        await self.durable.write(turn)

    async def prune(self) -> Sequence[object]:
        """All runs that have ended; which those were."""
        turn = self.turn()
        pruned: list[object] = finish(turn, self.pruning.prune(turn, keep=0, older_than_s=0.0))
        await self.durable.write(turn)
        return pruned

    def usage(self, by: str, since: str | None = None) -> list[UsageRow]:
        return accounts.rows(self.book.runs.values(), by, since, PRICES, self.now, self.book.pruned)

    async def keys(self) -> list[str]:
        return sorted(await self.durable.store.load(""))


async def test_memory_and_store_stay_flat_over_hundreds_of_ended_runs_and_the_sums_are_exact(tmp_path: Path) -> None:
    runs, keys, lengths = [], [], []
    async with Desk(tmp_path) as desk:
        for number in range(RUNS):
            await desk.end_a_run("ab"[number % 2], 64.0)
            desk.now += DAY_S / 4
            desk.at += EVERY_S
            for _ in range(3):
                await desk.tick()
            runs.append(len(desk.book.runs))
            if number % 100 == 99:
                stored = await desk.durable.store.load("")
                keys.append(len(stored))
                lengths.append(len(stored[f"note/{PRUNED}"][1]))
        most = 4 * OLD_DAYS + KEEP
        assert max(runs) <= most
        assert max(keys) <= len(("spec", "record", "root", "allocation")) * most + 1
        assert lengths[-1] < 1000 * len(lengths) * 25, "sums grow with days, and not with runs"
        assert len(desk.book.current) <= most
        *by_run, total = desk.usage("run")
        assert (total.allocated.node_s, total.allocated.gpu_s, total.jobs) == (RUNS * 64.0, RUNS * 128.0, RUNS)
        assert total.harvested.cost == RUNS * 64.0
        assert [row.key for row in by_run][-1] == "pruned"
        assert by_run[-1].allocated.node_s == (RUNS - runs[-1]) * 64.0
        assert [(row.key, row.jobs) for row in desk.usage("project")] == [
            ("a", RUNS // 2),
            ("b", RUNS // 2),
            ("total", RUNS),
        ]
        days = desk.usage("day")
        assert len(days) == RUNS // 4 + 2 and {row.jobs for row in days[1:-2]} == {4}
        assert desk.usage("project", since=days[-3].key)[-1].jobs == days[-3].jobs + days[-2].jobs


async def test_what_usage_tells_is_the_same_before_and_after_and_for_the_next_head(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    def told() -> list[list[UsageRow]]:
        return [desk.usage(by, since) for by in ("project", "day") for since in (None, "1972-09-28")]

    async with desk:
        for number, account in enumerate("aabca"):
            await desk.end_a_run(account, 1000.0 * (number + 1))
            desk.now += DAY_S / 2
        last = desk.now
        before = told()
        accounts.settle(desk.turn(), last + DAY_S)
        assert len(await desk.prune()) == 5
        assert told() == before
        assert await desk.keys() == [f"note/{PRUNED}"]
    async with desk:
        assert told() == before


async def test_a_head_that_is_refused_the_write_leaves_record_and_sums_as_they_were(tmp_path: Path) -> None:
    """The record goes and its sums come in one write: no sum is lost, and none counts twice."""
    async with Desk(tmp_path) as desk:
        await desk.end_a_run("a", 64.0)
        other = Durable(desk.paths, None)
        try:
            await other.open()
            await other.begin_term()
            with pytest.raises(Exception, match="another head has taken over"):
                await desk.prune()
            book = Registry(desk.paths, Config(), lambda: "id")
            await other.load(book, 0.0)
            assert PRUNED not in other.notes
            assert accounts.rows(book.runs.values(), "run", None, PRICES, desk.now)[-1].jobs == 1
        finally:
            await other.close()


async def test_a_run_whose_record_could_not_be_read_is_pruned_like_others(tmp_path: Path) -> None:
    async with Desk(tmp_path) as desk:
        run = await desk.end_a_run("a", 64.0)
        await desk.durable.store.save([Write(f"run/{run.id}/root", None, b"\xc1")], [])
    async with desk:
        (run,) = desk.book.runs.values()
        turn = desk.turn()
        turn.apply(run, ev.Cancel(at=desk.at, reason="it cannot be read", status=RunStatus.FAILED))
        accounts.settle(turn, desk.now)
        await desk.durable.write(turn)
        assert f"unreadable/{run.id}/root" in await desk.keys()
        for _ in range(2):
            await desk.prune()
        assert await desk.keys() == [f"note/{PRUNED}"], "what could not be read goes with its run"


async def test_sums_that_cannot_be_read_are_kept_for_somebody_who_can(tmp_path: Path) -> None:
    async with serving(tmp_path) as first:
        await first.head._durable.store.save([Write(f"note/{PRUNED}", 0, b"\xc1")], [])
    async with serving(tmp_path) as second:
        notes = await second.head._durable.store.load("note/")
        assert notes[f"note/{PRUNED}-unreadable"][1] == b"\xc1"
        assert second.head._registry.pruned == PrunedRuns()
        assert "internal.error" in second.log.getvalue()


async def test_an_error_while_runs_are_pruned_costs_no_run_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = deadlines.tick

    def change_every_run(turn: Turn) -> None:
        tick(turn)
        turn.dirty.update(turn.registry.current)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("bad")

    async with serving(tmp_path) as head:
        await head.create("going")
        monkeypatch.setattr(deadlines, "tick", change_every_run)
        monkeypatch.setattr(Pruning, "tick", fail)
        found = await head.until(
            lambda seen: any(error.count > 2 * GIVE_UP_AFTER for error in seen.head.internal_errors), "errors count"
        )
        assert [(error.source, error.run) for error in found.head.internal_errors] == [("pruning", None)]
        assert [view.status for view in found.runs] == [RunStatus.WAITING]
