"""`fallow local`: what scripts do, what users get wrong, and what is left behind.

What `tests/elastic` goes through is not told again here.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest
from local_rig import Box, Plain, expected_samples, same

from fallow.model import Exit, KeyFile
from nursery_client import MARK
from waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "contrib" / "examples"

# --------------------------------------------------------------------------------------------------- what scripts do


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        ["gpt_stdlib.py", "--steps", "90", "--global-batch", "32"],
        ["digits_cnn.py", "--epochs", "6"],
        ["gan_phases.py", "--epochs", "20"],
    ],
)
def test_an_example_comes_out_the_same_whoever_computes_it(words: list[str], box: Box) -> None:
    def train(**how: object) -> dict[str, object]:
        done = box.finish(box.local(str(EXAMPLES / words[0]), *words[1:], options=["--reproducible"], **how))
        assert done.code == 0, done.stderr
        wanted = [["n0", "n1"], ["n0", "n1", "n2", "n3"], ["n0", "n1", "n2"], ["n1", "n2"]]
        assert done.members == (wanted if "schedule" in how else [["n0"]])
        return {name: done.report[name] for name in ("steps", "samples", "final_loss", "final_digest")}

    assert train(schedule="+2@20,-1@40,-m0@60") == train(members=1)


def test_what_scripts_do_beside_the_training(box: Box, tiny: Plain) -> None:
    """run.log, run.barrier, @run.on_resize; evaluation on the main member alone, while the others wait, and on all."""
    words = box.tiny_words("--extras", "--hurry", str(box.hurry))
    process = box.local(*words, schedule="+1@20,kill:1@40,-m0@60")
    box.until(lambda view: view.scalars.get("evaluated", 0) >= 1)
    done = box.ends_with("n2", process=process).trained(90, expected_samples(90))
    assert done.kinds == ["start", "absorb", "eject", "release"]
    generations = [generation for generation in done.report["generations"] if "n2" in generation["members"]]
    # The main member at the end came with the second generation.
    sizes, steps = [told[:2] for told in done.result["resized"]], [told[2] for told in done.result["resized"]]
    assert sizes == [[len(g["members"]), g["members"].index("n2")] for g in generations]
    joined, after_kill, left = (generation["first_step"] for generation in generations)
    # Behind a kill it may be in the step whose sums only another one has: it goes on by those.
    assert steps in ([joined, after_kill, left], [joined, after_kill - 1, left])
    same(done, tiny())


@pytest.mark.soak
def test_every_word_of_a_schedule_happens(box: Box, tiny: Plain) -> None:
    """A newcomer is killed and another one comes, head and store are killed and come back, a member sleeps too long."""
    schedule = (
        "+1@11,kill:2@12,+1@13,head-kill@30,store-kill@60,store-kill@61,stop:1@90,cont:1@120,+2@150,-1@180,-m0@210"
    )
    process = box.local(*box.tiny_words("--hurry", str(box.hurry), steps=300), schedule=schedule)
    done = box.ends_with("n3", "n4", process=process).trained(300, expected_samples(300))
    assert done.members[-1] == ["n3", "n4"]
    same(done, tiny(300))


# --------------------------------------------------------------------------------------------- what users get wrong


@pytest.mark.parametrize(
    ("words", "steps", "message"),
    [
        (["--fail-at", "10"], 10, "ValueError: sample in step 10 is broken"),
        (["--early", "return"], 0, "the script ended without reaching run.updates(); call fallow.init(), run.prepare("),
        (
            ["--early", "raise"],
            0,
            "ended before its training loop: exited with 1 (RuntimeError: the data are not where",
        ),
    ],
)
def test_a_script_that_ends_before_its_time_fails_the_run(words: list[str], steps: int, message: str, box: Box) -> None:
    """With its traceback, which is that of the main member, once."""
    done = box.tiny(*words)
    assert done.code == Exit.SOFTWARE
    assert (done.report["status"], done.report["steps"]) == ("failed", steps)
    assert message in done.report["message"]
    assert message in done.stderr.splitlines()[-1]
    assert ("Traceback (most recent call last)" in done.stderr) == ("return" not in words)
    assert "fallow agent: Traceback" not in done.stderr, "and once more at the end"
    assert len(done.members) <= 2, "it was tried again and again"
    assert box.logs.count("ValueError: sample") == 0 if steps == 0 else 1 <= box.logs.count("ValueError: sample") <= 2


def test_a_newcomer_with_another_model_is_refused_and_the_others_finish(box: Box, tiny: Plain) -> None:
    done = box.tiny("--odd", "n2", schedule="+1@20").trained(90, expected_samples(90))
    assert done.members == [["n0", "n1"]]
    (line,) = [line for line in done.stderr.splitlines() if "did not take part" in line]
    assert "n2" in line
    assert "it has model.0.4.weight float64[4, 16], they have model.0.4.weight float64[3, 16]" in line
    same(done, tiny())


def test_first_members_that_differ_do_not_start(box: Box) -> None:
    done = box.tiny("--odd", "n1")
    assert done.code == Exit.SOFTWARE
    message = json.loads(done.stdout)["error"]["message"]
    assert "1 of the first 2 members did not reach run.updates()" in message
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
    wait_for("nothing is left", box.nothing_left)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ended_or_killed_it_leaves_no_process(number: signal.Signals, code: int, box: Box) -> None:
    process = box.local(*box.tiny_words(steps=100_000))
    box.until(lambda view: view.step >= 5)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == code
    assert "Traceback" not in stderr
    wait_for("nothing is left", box.nothing_left)
