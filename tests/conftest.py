"""Fixtures for all tests."""

from __future__ import annotations

from slurm_fixtures import make_testbed, slurm_installed, testbed

__all__ = ["make_testbed", "slurm_installed", "testbed"]
