"""The processes that the tests run in."""

from __future__ import annotations

from gpu.crew import crews

__all__ = ["crews"]
