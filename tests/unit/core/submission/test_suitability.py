"""What `fallow check` concludes from its trainings, and what it tells users to do."""

from typing import Any

import pytest

import views
from fallow.core.submission.schedule import parse_schedule
from fallow.core.submission.suitability import CHANGES, REPEAT, Advice, Trial, changes, conclude
from fallow.model import ChangeKind, Exit, GenerationReport, Parts, RunStatus

LAST = GenerationReport(
    generation=5, kind=ChangeKind.RELEASE, members=["n2"], first_step=80, pause_s=0.1, parts=Parts()
)
LACKING: dict[str, Any] = {"status": RunStatus.FAILED, "steps": 0}


def trial(name: str = "2 members", **report: Any) -> Trial:
    told = {field: report.pop(field) for field in ("absence",) if field in report}
    usual = {"reproducible": True, "generations": [LAST]}
    return Trial(name=name, seconds=1.0, report=views.report(**usual | report), **told)


FIRST = trial("1 member")


@pytest.mark.parametrize("steps", [12, 13, 15, 40, 1001])
def test_each_change_has_a_step_of_its_own_and_all_are_over_before_the_end(steps: int) -> None:
    items = parse_schedule(changes(steps), 1)
    at = [item.step for item in items]
    assert 0 < at[0] < at[1] < at[2] == at[3] < steps - 1
    assert [item.text.split("@")[0] for item in items] == ["+1", "kill:0", "+1", "-m1"]


def test_equal_weights_are_suitable_whoever_trained() -> None:
    result = conclude([FIRST, trial(), trial(CHANGES)])
    assert (result.suitable, result.code, result.advice) == (True, Exit.OK, None)


@pytest.mark.parametrize(
    ("report", "problem", "advice"),
    [
        ({"final_digest": "cd" * 32}, "the final weights differ (loss 0.125, undisturbed 0.125)", Advice.STATE),
        ({"samples": views.samples(lost=1)}, "(1 lost, 0 duplicated)", Advice.STATE),
        ({"steps": 99}, "99 steps, 6400 samples (0 lost, 0 duplicated); undisturbed 100 steps", Advice.STATE),
        ({"absence": "it has another model"}, "a node did not take part: it has another model", Advice.REFUSED),
        ({"status": RunStatus.FAILED, "message": "step 3: a break"}, "step 3: a break", Advice.REFUSED),
        ({"status": RunStatus.FAILED, "traceback": "ValueError"}, "the script fails: ", Advice.STATE),
    ],
)
def test_what_differs_from_the_undisturbed_training_is_named(
    report: dict[str, Any], problem: str, advice: Advice
) -> None:
    result = conclude([FIRST, trial(**report)])
    assert (result.suitable, result.code, result.trial, result.advice) == (False, Exit.DATA, "2 members", advice)
    assert problem in result.problem


def test_a_script_that_differs_from_itself_is_told_to_seed() -> None:
    trials = [FIRST, trial(final_digest="cd" * 32)]
    assert conclude([*trials, trial(REPEAT)]).advice is Advice.STATE
    assert conclude([*trials, trial(REPEAT, final_digest="ef" * 32)]).advice is Advice.SEED


@pytest.mark.parametrize(("loss", "suitable"), [(0.1255, True), (0.13, False), (None, False)])
def test_without_reproducible_mode_the_final_losses_must_be_close(loss: float | None, suitable: bool) -> None:
    plain = {"reproducible": False, "final_digest": "cd" * 32}
    assert conclude([trial("1 member", reproducible=False), trial(final_loss=loss, **plain)]).suitable is suitable


@pytest.mark.parametrize(
    ("report", "code", "advice"),
    [
        (LACKING | {"message": "ended without reaching run.updates(); call fallow.init()"}, Exit.DATA, Advice.PLAIN),
        (LACKING | {"message": "run.prepare got a model wrapped in DDP"}, Exit.DATA, Advice.REFUSED),
        (LACKING | {"message": "exited with 3"}, Exit.SOFTWARE, Advice.MEND),
        (LACKING | {"message": "ValueError: x", "traceback": "ValueError: x"}, Exit.SOFTWARE, Advice.MEND),
    ],
)
def test_a_failure_without_any_change_is_fallows_or_the_scripts(
    report: dict[str, Any], code: Exit, advice: Advice
) -> None:
    result = conclude([trial("1 member", **report)])
    assert (result.suitable, result.code, result.advice) == (False, code, advice)


def test_a_training_of_the_wrong_length_decides_nothing() -> None:
    late = Trial(name="1 member", seconds=1.0, report=None, error="not at its end after 10 minutes", is_late=True)
    for trials, code in (
        ([trial("1 member", steps=11)], Exit.DATA),
        ([FIRST, trial(CHANGES, generations=[views.changed(LAST, members=["n1", "n2"])])], Exit.DATA),
        ([late], Exit.TEMPFAIL),
    ):
        result = conclude(trials)
        assert (result.suitable, result.code) == (None, code)
        assert result.advice in (Advice.LONGER, Advice.SHORTER)
