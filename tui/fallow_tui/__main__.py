"""`python -m fallow_tui [--demo] [--read-only]`: the monitor without the rest of the command line."""

from __future__ import annotations

import argparse

from fallow_tui.app import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="fallow_tui", description="Terminal monitor of a Fallow head")
    parser.add_argument("--demo", action="store_true", help="show a make-believe cluster")
    parser.add_argument("--read-only", action="store_true", help="hide everything that changes something")
    options = parser.parse_args()
    raise SystemExit(main(read_only=options.read_only, demo=options.demo))
