"""Files that come with Fallow beside its code: examples, recorded clusters, systemd units."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_SOURCE = _PACKAGE.parents[1] / "contrib"


def shipped(kind: str) -> Path:
    """The folder of one kind: `examples`, `traces` or `systemd`; in the package, or in the source tree beside it."""
    installed = _PACKAGE / kind
    return installed if installed.is_dir() else _SOURCE / kind
