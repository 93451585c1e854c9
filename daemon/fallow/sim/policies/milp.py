"""BFTrainer's policy: whenever nodes come or go, solve an integer program for all runs (Liu et al., arXiv 2106.12091).

    max  sum_j  T · S_j(n_j) - S_j(c_j) · (T_up [n_j > c_j] + T_dw [n_j < c_j]),    n_j = 0 or min_j <= n_j <= max_j

with c_j the nodes that run j has, S_j its speed (linear between the points of its curve), and no run gaining and losing
nodes at once. Theirs has a variable for each run and node, and mixes the points of a curve (SOS2). Here, with the same
best solutions:

- Nodes of a kind are alike, so numbers of nodes are enough: from any numbers within the supply a placement is made by
  taking from the losers their surplus and giving it, with the spare nodes, to the winners, and as no run is both,
  nobody's other nodes move. A solution in nodes gives such numbers.
- A run has a whole number of nodes, so its part of the sum is known for each: one of these is chosen.
- Runs of the same curve and limits that have as many nodes are alike, too: how many of them get n nodes is enough.
- Where all use one kind, numbers of nodes that can be in no better solution than one found by simple exchanges are left
  out (`bounds`), and HiGHS begins with that one.

As it is written above HiGHS takes seconds for ten runs, or all of its time, so hundredths of a second: mixtures of
points and indicators leave much to branch on, and each solution is there once for every order of runs that are alike.

Solved by HiGHS (https://highs.dev, MIT). As in theirs, the time for it is limited and the old map stays if it was not
enough; a limit on branch-and-bound nodes comes first, so that results do not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, islice
from math import inf

from fallow.model import Exit, FallowError
from fallow.sim.policies.bounds import narrow
from fallow.sim.policies.standing import Counts, Crew, Shared, Standing

TIME_S = 10.0
NODES = 2000
"""Limits of one solution."""

GAP = 1e-4
"""Relative; what may be missing to the best solution."""


class Milp:
    """See above.

    Args:
        ahead_s: T, the time that a solution is taken to last.
        up_s, down_s: for which a run stands still when it grows or shrinks.
    """

    def __init__(self, crew: Crew, ahead_s: float, up_s: float, down_s: float) -> None:
        if find_spec("highspy") is None or find_spec("numpy") is None:
            raise FallowError("policy milp needs HiGHS: pip install 'fallow[sim]'", Exit.UNAVAILABLE)
        self._crew = crew
        self._ahead_s, self._up_s, self._down_s = ahead_s, up_s, down_s
        self._kinds = {run: tuple(kind for kind, users in enumerate(crew.users) if run in users) for run in crew.plans}
        "run -> kinds of nodes that it may use"
        self.solved = self.limited = 0
        "programs; those of them that met a limit"

    def share(self, standing: Standing) -> Shared:
        wanted = self.solve(standing.held, standing.spare)
        if wanted is None:
            return Shared()
        shared = Shared()
        for run, nodes in wanted.items():
            more = [n - c for n, c in zip(nodes, standing.held[run], strict=True)]
            if any(n > 0 for n in more):
                shared.give[run] = [max(0, n) for n in more]
            elif any(n < 0 for n in more):
                shared.take[run] = [max(0, -n) for n in more]
        return shared

    def solve(self, held: Mapping[str, Counts], spare: Sequence[int]) -> dict[str, Counts] | None:
        """Nodes of each kind for each run; None: a limit was met.

        Args:
            held: run -> the nodes of each kind that it has.
            spare: nodes of each kind that nobody has.
        """
        supply = [more + sum(each[kind] for each in held.values()) for kind, more in enumerate(spare)]
        classes = self._classes(held, supply)
        program = _Program()
        given: list[list[tuple[int, float]]] = [[] for _ in supply]
        "kind -> (column, nodes of that kind that it stands for)"
        added = [self._add(program, alike, held[alike.runs[0]], supply, given) for alike in classes]
        for terms, there in zip(given, supply, strict=True):
            program.row(terms, upper=there)
        self.solved += 1
        found = program.solve()
        if found is None:
            self.limited += 1
            return None
        values = [round(value) for value in found]
        return {
            run: nodes
            for alike, columns in zip(classes, added, strict=True)
            for run, nodes in self._read(alike, columns, values)
        }

    def _classes(self, held: Mapping[str, Counts], supply: Counts) -> list[_Class]:
        """The runs by what decides about them; each by itself where it may use several kinds."""
        found: dict[object, _Class] = {}
        for run, plan in self._crew.plans.items():
            kinds = self._kinds[run]
            what = (kinds, held[run][kinds[0]], plan.least, self._crew.speeds[run]) if len(kinds) == 1 else run
            if what not in found:
                found[what] = _Class([], self._gains(run, sum(held[run]), sum(supply[kind] for kind in kinds)))
            found[what].runs.append(run)
        classes = list(found.values())
        if {self._kinds[run] for run in self._crew.plans} == {(0,)}:
            narrowed = narrow([each.gains for each in classes for _ in each.runs], supply[0])
            shares = zip(narrowed.kept, narrowed.found, strict=True)
            for each in classes:
                mine = list(islice(shares, len(each.runs)))
                each.choices = sorted({nodes for kept, _ in mine for nodes in kept})
                each.first = Counter(nodes for _, nodes in mine)
        return classes

    def _gains(self, run: str, have: int, supply: int) -> list[float]:
        """What it adds to the sum by its number of nodes."""
        plan, speed = self._crew.plans[run], self._crew.speed
        stall = speed(run, have)
        return [
            self._ahead_s * speed(run, nodes) - stall * (self._up_s * (nodes > have) + self._down_s * (nodes < have))
            if nodes >= plan.least or not nodes
            else -inf
            for nodes in range(min(plan.most, supply) + 1)
        ]

    def _add(
        self,
        program: _Program,
        alike: _Class,
        held: Counts,
        supply: Counts,
        given: list[list[tuple[int, float]]],
    ) -> _Columns:
        """Columns and rows of runs that are alike."""
        number, kinds = len(alike.runs), self._kinds[alike.runs[0]]
        columns = {nodes: program.column(alike.gains[nodes], number, alike.first[nodes]) for nodes in alike.choices}
        program.row([(column, 1.0) for column in columns.values()], lower=number, upper=number)
        total = [(column, float(nodes)) for nodes, column in columns.items() if nodes]
        if len(kinds) == 1:
            given[kinds[0]] += total
            return _Columns(columns, {})
        most = len(alike.gains) - 1
        counts = {kind: program.column(0.0, min(most, supply[kind])) for kind in kinds}
        program.row(
            [*((column, 1.0) for column in counts.values()), *((c, -n) for c, n in total)], lower=0.0, upper=0.0
        )
        grows = [column for nodes, column in columns.items() if nodes > sum(held)]
        shrinks = [column for nodes, column in columns.items() if nodes < sum(held)]
        for kind, column in counts.items():
            program.row([(column, 1.0), *((up, -float(most)) for up in grows)], upper=held[kind])
            program.row([(column, 1.0), *((down, float(held[kind])) for down in shrinks)], lower=held[kind])
            given[kind].append((column, 1.0))
        return _Columns(columns, counts)

    def _read(self, alike: _Class, columns: _Columns, values: Sequence[int]) -> Iterator[tuple[str, Counts]]:
        """What each of these runs has in the solution."""
        numbers = [nodes for nodes, column in columns.choices.items() for _ in range(values[column])]
        for run, nodes in zip(alike.runs, numbers, strict=True):
            counts = [0] * self._crew.kinds
            if len(self._kinds[run]) == 1:
                counts[self._kinds[run][0]] = nodes
            for kind, column in columns.counts.items():
                counts[kind] = values[column]
            yield run, counts


class _Class:
    """Runs that are alike.

    Args:
        runs: their names.
        gains: of each of them, by its number of nodes.
    """

    def __init__(self, runs: list[str], gains: list[float]) -> None:
        self.runs, self.gains = runs, gains
        self.choices = [nodes for nodes, gain in enumerate(gains) if gain > -inf]
        "numbers of nodes that they may have"
        self.first: Counter[int] = Counter()
        "number of nodes -> how many of them have it in the solution to begin with; none: there is none"


@dataclass(frozen=True, slots=True)
class _Columns:
    choices: dict[int, int]
    "nodes -> the column with how many of the runs get so many"
    counts: dict[int, int]
    "kind -> the column with the (only) run's nodes of that kind, where it may use several"


class _Program:
    """A mixed integer program to be maximised, row by row."""

    def __init__(self) -> None:
        self._gains: list[float] = []
        self._uppers: list[float] = []
        self._first: list[float] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def column(self, gain: float, upper: int, first: int = 0) -> int:
        """A whole number from 0 to `upper`, and which to begin with."""
        self._gains.append(gain)
        self._uppers.append(float(upper))
        self._first.append(float(first))
        return len(self._gains) - 1

    def row(self, terms: list[tuple[int, float]], lower: float = -inf, upper: float = inf) -> None:
        self._rows.append((terms, lower, upper))

    def solve(self) -> list[float] | None:
        """The variables' values; None: a limit was met."""
        import highspy

        lp = highspy.HighsLp()
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.num_col_, lp.num_row_ = len(self._gains), len(self._rows)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self._gains, [0.0] * len(self._gains), self._uppers
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(self._gains)
        lp.row_lower_ = [lower for _, lower, _ in self._rows]
        lp.row_upper_ = [upper for _, _, upper in self._rows]
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = [0, *accumulate(len(terms) for terms, _, _ in self._rows)]
        matrix.index_ = [column for terms, _, _ in self._rows for column, _ in terms]
        matrix.value_ = [value for terms, _, _ in self._rows for _, value in terms]
        solver = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": GAP}
        for name, value in {**options, "time_limit": TIME_S, "mip_max_nodes": NODES}.items():
            solver.setOptionValue(name, value)
        solver.passModel(lp)
        if any(self._first):
            first = highspy.HighsSolution()
            first.col_value = self._first
            solver.setSolution(first)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return list(solver.getSolution().col_value)
