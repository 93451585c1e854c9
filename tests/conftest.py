"""Fixtures for all tests."""

from __future__ import annotations

import signal

from slurm_fixtures import make_testbed, slurm_installed, testbed

__all__ = ["make_testbed", "slurm_installed", "testbed"]

# Background jobs of a shell have SIGINT ignored, and their children inherit that: tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
