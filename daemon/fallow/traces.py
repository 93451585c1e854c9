"""The recorded clusters that come with Fallow: where they are, and what their files do not say."""

from __future__ import annotations

from pathlib import Path

from fallow.model import Exit, FallowError
from fallow.shipped import shipped

FOLDER = shipped("traces")
SHIPPED = {
    "earth": "helios_earth_2020-05_jobs.csv.gz",
    "helios": "helios_earth_2020-05_jobs.csv.gz",
    "philly": "philly_2017_active_nodes.csv.gz",
    "summit": "summit_like_holes.csv.gz",
}
"""Name -> file; contrib/traces/README.md says what each of them is."""

# Of equal ones the liveliest first (vchbv: 29,105 jobs in the month).
HELIOS_NODES = {
    name: size
    for size, names in {
        26: "vc6YE", 12: "vcvlY", 8: "vchbv vc3sl vcLJZ vcMod", 7: "vcpDC", 6: "vc8Sj vcTJs",
        4: "vcSoL vccaA", 3: "vcira", 2: "vcJLV vcJkd vcdI0", 1: "vcgkz",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Nodes of each virtual cluster of the Helios Earth trace."""
HELIOS_GPUS = 8
"""On each node."""


def trace_path(name: str | Path) -> Path:
    """A trace by path, or by the name of one of those that come with Fallow."""
    if str(name) not in SHIPPED:
        path = Path(name)
        if path.name == str(name) and not path.exists():
            raise FallowError(
                f"{name}: no such file, and no trace that comes with Fallow is called that; they are "
                f"{', '.join(SHIPPED)}",
                Exit.NOINPUT,
            )
        return path
    return FOLDER / SHIPPED[str(name)]
