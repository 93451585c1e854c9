"""The processes that the tests run in."""

from gpu.crew import crews

__all__ = ["crews"]
