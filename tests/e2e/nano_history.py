"""Runs `nano_fallow.py`, whose main member is killed in a step: nano_history.py STEP FILE [PACE]; STEP -1: in none."""

import runpy
import sys
from pathlib import Path

from seams import die, once, place

import fallow

STEP = int(sys.argv.pop(1))
plain_init = fallow.init


def init() -> fallow.Run:
    """The run of the script, with the trap in it."""
    run = plain_init()
    # Only who was there from the start, so that it happens once.
    place("wait", once(die, lambda: bool(run.is_main) and run.step == STEP and run.size > 1))
    return run


fallow.init = init
runpy.run_path(str(Path(__file__).with_name("nano_fallow.py")), run_name="__main__")
