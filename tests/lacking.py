"""What a machine lacks that a test needs."""

import os
from typing import NoReturn

import pytest


def lacks(reason: str) -> NoReturn:
    """Leave the test out; but where the environment says CI=true nothing may be left out unseen, and it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: not left out)")
    pytest.skip(reason)
