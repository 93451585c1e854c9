"""Fixtures of the tests of whole runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

from local_rig import box, plain, script, tiny

from command_line import fallow

__all__ = ["box", "fallow", "plain", "script", "tiny"]
