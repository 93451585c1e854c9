"""A training with all that scripts have: the same result as plain torch in one process, whoever computes what."""

import json
from pathlib import Path
from typing import Any

from local_rig import Script

SCRIPT = str(Path(__file__).with_name("pattern_worlds.py"))
CLOSE = 2e-7
"""Of float32 sums in another order, after 36 steps."""


def test_worlds_of_any_size_train_as_plain_torch_does(script: Script) -> None:
    worlds: list[dict[str, Any]] = [json.loads(line) for line in script(SCRIPT).splitlines()]
    assert [(world["size"], world["reproducible"]) for world in worlds] == [
        (size, reproducible) for reproducible in (False, True) for size in (1, 2, 5)
    ]
    assert not [world for world in worlds if world["refused"]]
    for world in worlds:
        assert len(world["digests"]) == 1, "ranks of one world end with other weights"
        assert world["untouched"], "other parameters have no gradient than in plain torch"
        assert world["scale"]
        assert world["difference"] < CLOSE
    digests = [{world["digests"][0] for world in worlds if world["reproducible"] == exact} for exact in (False, True)]
    assert (len(digests[0]) > 1, len(digests[1])) == (True, 1), "this training can tell, and there is one result"
