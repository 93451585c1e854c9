"""BFTrainer's policy: whenever nodes come or go, solve an integer program for all runs (Liu et al., arXiv 2106.12091).

    max  sum_j  T · S_j(n_j) - S_j(c_j) · (T_up [n_j > c_j] + T_dw [n_j < c_j]),    n_j = 0 or min_j <= n_j <= max_j

with c_j the nodes that run j has, S_j its speed (linear between the points of its curve), and no run gaining and losing
nodes at once. Theirs has a variable for each run and node; nodes of a kind are alike, so numbers of nodes are enough:
from any numbers within the supply a placement is made by taking from the losers their surplus and giving it, with the
spare nodes, to the winners, and as no run is both, nobody's other nodes move. A solution in nodes gives such numbers.

Solved by HiGHS (https://highs.dev, MIT). As in theirs, the time for it is limited and the old map stays if it was not
enough; a limit on branch-and-bound nodes comes first, so that results do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import inf

from fallow.model import Exit, FallowError
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
        self._curves = {run: _points(crew, run) for run in crew.plans}
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
        program = _Program()
        counts = {run: self._add_run(program, run, held[run]) for run in self._crew.plans}
        for kind, users in enumerate(self._crew.users):
            supply = spare[kind] + sum(each[kind] for each in held.values())
            program.row([(counts[run][kind], 1.0) for run in users], upper=supply)
        self.solved += 1
        values = program.solve()
        if values is None:
            self.limited += 1
            return None
        return {
            run: [round(values[columns[kind]]) if kind in columns else 0 for kind in range(self._crew.kinds)]
            for run, columns in counts.items()
        }

    def _add_run(self, program: _Program, run: str, held: Counts) -> dict[int, int]:
        """Its columns and rows; returns kind -> the column with its nodes of that kind."""
        plan, points = self._crew.plans[run], self._curves[run]
        have, most = sum(held), plan.most
        stall = self._crew.speed(run, have)
        up = program.column(-stall * self._up_s)
        down = program.column(-stall * self._down_s)
        program.row([(up, 1.0), (down, 1.0)], upper=1.0)
        # Kinds that it has and may not use cannot be: they were given to it by the same rules.
        counts = {kind: program.column(0.0, upper=most) for kind, users in enumerate(self._crew.users) if run in users}
        for kind, column in counts.items():
            program.row([(column, 1.0), (up, -float(most))], upper=held[kind])
            program.row([(column, 1.0), (down, float(held[kind]))], lower=held[kind])
        on_curve = [program.column(speed * self._ahead_s, whole=False) for _, speed in points]
        program.row([(column, 1.0) for column in on_curve], lower=1.0, upper=1.0)
        nodes = [(column, 1.0) for column in counts.values()]
        program.row(
            [*nodes, *((column, -float(n)) for column, (n, _) in zip(on_curve, points, strict=True))],
            lower=0.0,
            upper=0.0,
        )
        if plan.least > 1:
            on = program.column(0.0)
            program.row([*nodes, (on, -float(plan.least))], lower=0.0)
            program.row([*nodes, (on, -float(most))], upper=0.0)
        if not _concave(points):
            # Only neighbours on the curve may be mixed (SOS2).
            pieces = [program.column(0.0) for _ in points[1:]]
            program.row([(piece, 1.0) for piece in pieces], lower=1.0, upper=1.0)
            for place, column in enumerate(on_curve):
                beside = pieces[max(0, place - 1) : place + 1]
                program.row([(column, 1.0), *((piece, -1.0) for piece in beside)], upper=0.0)
        return counts


class _Program:
    """A mixed integer program to be maximised, row by row."""

    def __init__(self) -> None:
        self._gains: list[float] = []
        self._uppers: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []

    def column(self, gain: float, upper: float = 1.0, *, whole: bool = True) -> int:
        """A variable from 0 to `upper`."""
        self._gains.append(gain)
        self._uppers.append(float(upper))
        self._whole.append(whole)
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
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[whole] for whole in self._whole]
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
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return list(solver.getSolution().col_value)


def _points(crew: Crew, run: str) -> list[tuple[int, float]]:
    """Corners of the curve, from nothing to the most nodes."""
    plan = crew.plans[run]
    inner = {nodes - plan.base for nodes, _ in plan.rate if plan.least < nodes - plan.base < plan.most}
    return [(nodes, crew.speed(run, nodes)) for nodes in sorted({0, plan.least, *inner, plan.most})]


def _concave(points: Sequence[tuple[int, float]]) -> bool:
    slopes = [(s1 - s0) / (n1 - n0) for (n0, s0), (n1, s1) in pairwise(points)]
    return all(a >= b for a, b in pairwise(slopes))
