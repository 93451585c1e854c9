"""What `fallow check` concludes from trainings of one script with and without changes of the membership."""

import math
from collections.abc import Sequence
from enum import StrEnum

from fallow.model import Exit, RunReport, RunStatus, Struct

REPEAT, CHANGES = "1 member, repeated", "changes"
"""Names of two trainings: one tells whether the script has the same result twice, one is disturbed."""
_LEAST_STEPS, _TOLERANCE = 12, 0.01
"""Fewer steps leave no room between the changes. Other orders of a sum move a loss by less than this part of it."""


class Advice(StrEnum):
    PLAIN = "change the script: docs/training.md; or let each change restart it: fallow run --restart, docs/restart.md"
    MEND = "mend the script first"
    REFUSED = "docs/refused.md says for each such text what to write instead"
    SHORTER = "shorten the training by the script's options (20 to 200 steps); it must loop over run.updates()"
    LONGER = "train more steps by the script's options, until one member takes 10 s or more for all of them"
    SEED = "the script draws without a seed; call torch.manual_seed(0) before it makes the model and the data"
    STATE = "prepare all that training changes, and draw nothing by rank or process: docs/is-my-script-suitable.md"


class Trial(Struct, frozen=True, kw_only=True):
    """One training of the script. It has no report, but an error, if it did not come to its end."""

    name: str
    seconds: float
    report: RunReport | None
    error: str = ""
    is_late: bool = False
    absence: str = ""
    "why a node did not take part"
    warnings: tuple[str, ...] = ()


class Suitability(Struct, frozen=True, kw_only=True):
    """What `fallow check --json` prints. `suitable` is null if the training was too short or too long to tell."""

    suitable: bool | None = True
    code: int = Exit.OK
    trial: str = ""
    problem: str = ""
    advice: Advice | None = None
    trials: tuple[Trial, ...]


def changes(steps: int) -> str:
    """Schedule of a training of that many steps. It begins with n0, and only n2 is left at the end."""
    swap = steps * 3 // 4
    return f"+1@{steps // 4},kill:0@{steps // 2},+1@{swap},-m1@{swap}"


def conclude(trials: Sequence[Trial]) -> Suitability:
    """Compare all trainings with the first one, which is undisturbed and has one member."""
    # If a repetition differs, too, the script by itself is the reason.
    for trial in sorted(trials, key=lambda trial: trial.name != REPEAT):
        problem, advice = _problem_of(trial, trials[0])
        if advice is not None:
            code = {Advice.MEND: Exit.SOFTWARE, Advice.SHORTER: Exit.TEMPFAIL}.get(advice, Exit.DATA)
            verdict = None if advice in (Advice.LONGER, Advice.SHORTER) else False
            return Suitability(
                suitable=verdict, code=code, trial=trial.name, problem=problem, advice=advice, trials=tuple(trials)
            )
    return Suitability(trials=tuple(trials))


def _problem_of(trial: Trial, first: Trial) -> tuple[str, Advice | None]:
    """What went wrong in a training, compared with the undisturbed one, and what to do."""
    report, reference = trial.report, first.report
    if report is None or reference is None:
        return trial.error, Advice.SHORTER if trial.is_late else Advice.REFUSED
    if report.status is not RunStatus.FINISHED:
        if not report.steps and "fallow.init()" in report.message:
            return f"the script is not elastic: {report.message}", Advice.PLAIN
        if not report.traceback and "exited with" not in report.message:
            return report.message, Advice.REFUSED
        is_own = trial is first
        return f"the script fails{' by itself' * is_own}: {report.message}", Advice.MEND if is_own else Advice.STATE
    counts, usual = _counts(report), _counts(reference)
    if trial.absence:
        return f"a node did not take part: {trial.absence}", Advice.REFUSED
    if counts != usual or report.samples.lost or report.samples.duplicated:
        return f"{counts}; undisturbed {usual}", Advice.STATE
    if report.steps < _LEAST_STEPS:
        return f"{counts}; changes of the membership need {_LEAST_STEPS} steps", Advice.LONGER
    is_exact = report.reproducible and None not in (report.final_digest, reference.final_digest)
    losses = [math.nan if each.final_loss is None else each.final_loss for each in (report, reference)]
    are_close = report.final_loss == reference.final_loss or math.isclose(*losses, rel_tol=_TOLERANCE)
    if report.final_digest != reference.final_digest if is_exact else not are_close:
        what = "weights differ" if is_exact else f"losses differ by more than {_TOLERANCE:.0%}"
        problem = f"the final {what} (loss {report.final_loss}, undisturbed {reference.final_loss})"
        return problem, Advice.SEED if trial.name == REPEAT else Advice.STATE
    if trial.name == CHANGES and report.generations[-1].members != ["n2"]:
        return "the training ended before all changes had taken effect", Advice.LONGER
    return "", None


def _counts(report: RunReport) -> str:
    samples = report.samples
    return f"{report.steps} steps, {samples.consumed} samples ({samples.lost} lost, {samples.duplicated} duplicated)"
