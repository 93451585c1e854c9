"""A newcomer's rehearsal, where those whom it was to join are gone before they could give it their state."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from fallow.worker.api.run import Run
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import Script, assert_equal


def test_who_has_rehearsed_and_then_begins_alone_trains_as_one_that_has_not(tmp_path: Path) -> None:
    """The head has made it the main one by then. It is not while it rehearses."""
    seen: list[tuple[bool, int, bool]] = []

    def train(run: Run) -> Script:
        script, session = Script(run).prepare(), run._session
        assert session is not None
        for update in run.updates(script.loader, epochs=2):
            if session.worker == "b":
                session.is_main = True  # type: ignore[misc]
                seen.append((run.rehearsing, update.step, bool(run.is_main)))
            script.inner(update)
            script.act()
        return script

    found = World(tmp_path, Generation("a", breaks=Break(1, "", "a")), Generation("b")).train(train)
    assert isinstance(found["a"], Killed)
    undisturbed = Script().prepare()
    undisturbed.train(epochs=2)
    assert_equal(found["b"].model, undisturbed.model)
    assert seen == [(True, 0, False), *[(False, step, True) for step in range(4)]]
