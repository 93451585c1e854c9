"""`fallow local`: what scripts do, what users get wrong, and what is left behind.

What `tests/elastic` goes through is not told again here.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest
from local_rig import TINY, Box, Plain, expected_samples, same, wait

from fallow.model import Exit, KeyFile
from nursery_client import MARK

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "contrib" / "examples"
ODD_LATER, PROBE, SETTINGS, TURNED = (
    str(HERE / f"{name}.py") for name in ("odd_later_training", "example_probe", "settings_training", "turned_training")
)
GPT = ["--steps", "90", "--global-batch", "32"]

# ------------------------------------------------------------------------------------------------- the two examples

SCHEDULE = "+2@20,-1@40,-m0@60"
EXPECTED = [["n0", "n1"], ["n0", "n1", "n2", "n3"], ["n0", "n1", "n2"], ["n1", "n2"]]

CASES = [
    pytest.param(["gpt_stdlib.py", *GPT], 90 * 32, 1e-5, id="gpt"),
    pytest.param(["--double", "digits_cnn.py", "--epochs", "6"], 6 * 1500, 1e-6, id="digits"),
]


def probe(words: list[str], result: str) -> list[str]:
    return [PROBE, result, *(str(EXAMPLES / word) if word.endswith(".py") else word for word in words)]


@pytest.mark.soak
@pytest.mark.parametrize(("words", "samples", "tolerance"), CASES)
def test_an_example_comes_out_the_same_whoever_computes_it(
    words: list[str], samples: int, tolerance: float, box: Box, plain: Plain
) -> None:
    alone = plain(*probe(words, "RESULT"))
    result = str(box.folder / "result.json")
    done = box.finish(box.local(*probe(words, result), schedule=SCHEDULE)).trained(90, samples)
    assert done.members == EXPECTED
    assert done.kinds == ["start", "absorb", "release", "release"]
    for generation, item in zip(done.report["generations"][1:], (20, 40, 60), strict=True):
        assert generation["first_step"] >= item
        assert 0 < generation["pause_s"] < 20
        assert sum(generation["parts"].values()) == pytest.approx(generation["pause_s"], rel=0.2, abs=0.02)
    assert (alone["steps"], alone["samples"]) == (90, samples)
    assert done.report["final_loss"] == pytest.approx(alone["loss"], abs=tolerance)
    assert len(done.report["final_digest"]) == 64


@pytest.mark.soak
def test_an_example_under_torchrun(box: Box, plain: Plain) -> None:
    words = ["gpt_stdlib.py", "--steps", "10", "--global-batch", "32"]
    alone = plain(*probe(words, "RESULT"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = box.finish(box.start(*launcher, *probe(words, str(box.folder / "result.json"))))
    assert done.code == 0, done.stderr
    assert (done.result["steps"], done.result["samples"]) == (10, 10 * 32)
    assert done.result["loss"] == pytest.approx(alone["loss"], abs=1e-5)


# -------------------------------------------------------------------------------------------------- what scripts do


def test_what_scripts_do_beside_the_training(box: Box, tiny: Plain) -> None:
    """run.log, run.barrier, @run.on_resize; evaluation on the main member alone, while the others wait, and on all."""
    process = box.local(*box.tiny_words("--extras"), schedule="+1@20,kill:1@40,-m0@60")
    box.until(lambda view: view.scalars.get("evaluated", 0) >= 1)
    done = box.finish(process).trained(90, expected_samples(90))
    assert done.kinds == ["start", "absorb", "eject", "release"]
    generations = [generation for generation in done.report["generations"] if "n2" in generation["members"]]
    # The main member at the end came with the second generation.
    sizes, steps = [told[:2] for told in done.result["resized"]], [told[2] for told in done.result["resized"]]
    assert sizes == [[len(g["members"]), g["members"].index("n2")] for g in generations]
    joined, after_kill, left = (generation["first_step"] for generation in generations)
    # Behind a kill it may be in the step whose sums only another one has: it goes on by those.
    assert steps in ([joined, after_kill, left], [joined, after_kill - 1, left])
    same(done, tiny())


def test_settings_between_loops_count_once_for_newcomers(box: Box, plain: Plain) -> None:
    """Their scripts run lines that the received state has already: another group of parameters, a smaller rate.

    The second one comes while the members end a loop: its state is from before the lines behind that loop.
    """
    command = [SETTINGS, "--result", str(box.folder / "result.json"), "--newcomer-at-end"]
    # Wanted earlier than in step 15, the second one might be there before that step, the loop's last, begins.
    done = box.finish(box.local(*command, schedule="+1@6,+1@15,-m0@24")).trained(32, 512)
    assert done.kinds == ["start", "absorb", "absorb", "release"]
    assert done.report["generations"][2]["first_step"] == 16
    assert done.result == plain(SETTINGS, "--pace", "0", "--result", "RESULT")


@pytest.mark.soak
def test_every_word_of_a_schedule_happens(box: Box, tiny: Plain) -> None:
    """A newcomer is killed and another one comes, head and store are killed and come back, a member sleeps too long."""
    schedule = (
        "+1@11,kill:2@12,+1@13,head-kill@30,store-kill@60,store-kill@61,stop:1@90,cont:1@120,+2@150,-1@180,-m0@210"
    )
    done = box.tiny(steps=300, schedule=schedule).trained(300, expected_samples(300))
    assert done.members[-1] == ["n3", "n4"]
    same(done, tiny(300))


def test_a_stream_comes_out_the_same_whoever_computes_it(box: Box, plain: Plain) -> None:
    """Eight steps an epoch; with two loader processes the last one has two small batches."""
    words = ["--stream", "--num-workers", "2", "--samples", "252", "--float32", "--reproducible", "--steps", "40"]
    done = box.tiny(*words, schedule="+1@5,kill:1@14,-m0@22").trained(40, 5 * 252)
    assert done.kinds == ["start", "absorb", "eject", "release"]
    assert done.members[-1] == ["n2"]
    assert done.result == plain(TINY, *words, "--pace", "0", "--result", "RESULT")


def test_nodes_of_several_workers_come_and_go_as_a_whole(box: Box, tiny: Plain) -> None:
    done = box.tiny(options=["--workers-per-node", "2"], schedule="+1@20,kill:1@40,-m0@60")
    done.trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    assert done.kinds == ["start", "absorb", "eject", "release"]
    same(done, tiny())


# --------------------------------------------------------------------------------------------- what users get wrong


def test_an_exception_in_the_script_ends_the_run_with_its_traceback(box: Box) -> None:
    done = box.tiny("--fail-at", "10")
    assert done.code == Exit.SOFTWARE
    assert (done.report["status"], done.report["steps"]) == ("failed", 10)
    assert "ValueError: sample in step 10 is broken" in done.report["message"]
    assert "ValueError: sample in step 10 is broken" in done.stderr.splitlines()[-1]
    assert "Traceback (most recent call last)" in done.stderr, "the main member's own output is shown"
    assert "fallow agent: Traceback" not in done.stderr, "and once more at the end"
    assert 'raise ValueError(f"sample in step' in box.logs
    assert len(done.members) <= 2, "it was tried again and again"
    assert box.logs.count("ValueError: sample") <= 2


@pytest.mark.parametrize(
    ("early", "message"),
    [
        ("return", "the script ended without reaching run.updates(); call fallow.init(), run.prepare(...) and loop"),
        ("raise", "ended before its training loop: exited with 1 (RuntimeError: the data are not where they were)"),
    ],
)
def test_a_script_that_never_reaches_the_loop(early: str, message: str, box: Box) -> None:
    done = box.tiny("--early", early, members=1)
    assert done.code == Exit.SOFTWARE
    assert done.report["status"] == "failed"
    assert message in done.report["message"]
    assert message in done.stderr.splitlines()[-1]
    assert ("Traceback (most recent call last)" in done.stderr) == (early == "raise")
    assert done.report["generations"] == []


def test_a_newcomer_with_another_model_is_refused_and_the_others_finish(box: Box, tiny: Plain) -> None:
    done = box.tiny("--odd", "n2", schedule="+1@20").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"]]
    (line,) = [line for line in done.stderr.splitlines() if "did not take part" in line]
    assert "n2" in line
    assert "it has model.0.4.weight float64[4, 16], they have model.0.4.weight float64[3, 16]" in line
    same(done, tiny())


def test_newcomers_with_another_loader_in_a_later_loop_are_refused_and_the_others_finish(box: Box) -> None:
    """One is a member when the second loop begins; the other comes in the middle of it: found in a step."""
    done = box.finish(box.local(ODD_LATER, schedule="+1@3,+1@50"))
    assert done.code == 0, done.stderr
    assert (done.report["status"], done.report["steps"]) == ("finished", 100)
    assert done.report["samples"] == {"consumed": 100 * 16, "lost": 0, "duplicated": 0}
    assert done.kinds == ["start", "absorb", "eject", "absorb", "eject"]
    assert done.members[-1] == ["n0", "n1"]
    assert done.report["generations"][2]["first_step"] == 40
    for generation in done.report["generations"][2::2]:
        reason = generation["reason"]
        assert "rank 2 cuts a step into 8 shards of 2 samples, rank 0 into 4 of 4: give the DataLoader" in reason


def test_first_members_that_differ_do_not_start(box: Box) -> None:
    done = box.tiny("--odd", "n1")
    assert done.code == Exit.SOFTWARE
    message = json.loads(done.stdout)["error"]["message"]
    assert "1 of the first 2 members did not come to run.updates()" in message
    assert "model.0.4.weight float64[4, 16]" in message


# ------------------------------------------------------------------------------------- what is left, shown and open


def test_ctrl_c_leaves_nothing_and_a_run_shows_and_opens_nothing(box: Box) -> None:
    process = box.exec_local(*box.tiny_words(steps=100_000), members=2)
    box.until(lambda view: view.step >= 10)
    seen = box.processes()
    names = [" ".join(one.cmdline()) for one in seen]
    assert sum("fallow.head" in name for name in names) == 1
    assert sum("fallow.agent" in name for name in names) == 2
    secrets = [
        json.loads(file.read_text(), object_hook=lambda made: made)["secret_key"]
        for file in box.folder.glob("fallow-local-*/state/runs/*/keys/*.json")
    ]
    secrets += [file.read_text().strip() for file in box.folder.glob("fallow-local-*/state/head.key")]
    assert len(secrets) == 3
    assert "secret_key" in KeyFile.__struct_fields__
    for one in seen:
        shown = "\0".join([*one.cmdline(), *(f"{name}={value}" for name, value in one.environ().items())])
        assert not [secret for secret in secrets if secret in shown], one.cmdline()
    (worker,) = (one.environ() for one in seen if one.environ().get("FALLOW_WORKER") == "n0")
    ours = {name for name in worker if name.startswith("FALLOW_")} - {MARK}
    assert ours == {
        *("FALLOW_WORKER", "FALLOW_RUN", "FALLOW_CHANNEL_FD", "FALLOW_STATE_DIR", "FALLOW_CONFIG"),
        *("FALLOW_SLURM__CLIENT", "FALLOW_HEAD__ADDRESS", "FALLOW_MEMBERSHIP__BEAT_S", "FALLOW_OUTPUT_PIPES"),
    }
    listening = {
        connection.laddr.ip
        for one in seen
        for connection in one.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "logs are kept in" in stderr
    assert "Traceback" not in stderr
    wait(box.nothing_left, 10.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ended_or_killed_it_leaves_no_process(number: signal.Signals, code: int, box: Box) -> None:
    process = box.local(*box.tiny_words(steps=100_000))
    box.until(lambda view: view.step >= 5)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == code
    assert "Traceback" not in stderr
    wait(box.nothing_left, 15.0)


def test_reproducible_bits(box: Box, plain: Plain) -> None:
    """Absorb, a kill of rank 0, a release of rank 0, uneven shares: the digest of plain `python`, to the last bit."""
    command = box.tiny_words("--float32")
    done = box.finish(box.local(*command, schedule="+1@15,kill:0@30,-m1@45,+2@60", options=["--reproducible"]))
    done.trained(90, expected_samples(90))
    assert len(done.kinds) == 5
    assert done.report["reproducible"] is True
    assert done.report["steps_repeated"] >= 1
    assert done.result == plain(TINY, "--float32", "--reproducible", "--pace", "0", "--result", "RESULT")


def test_members_whose_gradients_come_in_another_order(box: Box, plain: Plain) -> None:
    """Buckets are laid out as the gradients came on one of the first members; here the others' come the other way."""
    done = box.finish(box.local(TURNED, str(box.folder / "result.json"), schedule="+1@10,kill:0@20"))
    done.trained(40, 640)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"]]
    assert done.result == plain(TURNED, "RESULT")


def test_an_odd_member_of_a_reproducible_run_is_refused(box: Box) -> None:
    how = {"members": 1, "schedule": "+1@10", "options": ["--reproducible"]}
    done = box.tiny("--many-threads", "n1", steps=20, **how)
    assert done.code == 0, done.stderr
    assert done.kinds == ["start"]
    assert "it computes with 2 thread(s), the members with 1 thread(s)" in done.stderr
