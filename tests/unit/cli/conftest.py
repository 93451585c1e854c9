"""Fixtures for tests of the command line."""

from __future__ import annotations

from command_line import fallow

__all__ = ["fallow"]
