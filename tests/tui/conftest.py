"""The monitor, ready to be started."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tui_rig import START, Clock, FakeSource, Rig

from fallow_tui.app import TopApp


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    def make(read_only: bool = False) -> Rig:
        source, monotonic = FakeSource(), Clock(100.0)
        app = TopApp(source, read_only=read_only, monotonic=monotonic, wall=Clock(START), retry_s=0.0)
        return Rig(app, source, monotonic)

    return make
