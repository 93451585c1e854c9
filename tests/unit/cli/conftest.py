"""Fixtures for tests of the command line."""

from command_line import fallow

__all__ = ["fallow"]
