"""Fixtures of the elastic scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from elastic_rig import MakeRig, Rig, Undisturbed

from fallow.model import RunReport
from nursery_client import NurseryClient


@pytest.fixture
def make_rig(nursery: NurseryClient, tmp_path: Path) -> MakeRig:
    """`make_rig(membership__lease_s=1.5)`: a head over a folder of its own, to be entered."""

    def make(**config: object) -> Rig:
        folder = tmp_path / "rig"
        folder.mkdir(mode=0o700)
        return Rig(nursery, folder, **config)

    return make


@pytest.fixture(scope="session")
def undisturbed(nursery: NurseryClient, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Report of the same training by one member to which nothing happens; each is run once."""
    known: dict[tuple[object, ...], RunReport] = {}

    async def train(options: tuple[object, ...]) -> RunReport:
        async with Rig(nursery, tmp_path_factory.mktemp("undisturbed")) as rig:
            run = await rig.run(*options, "--pace", 0)
            await run.begin(1)
            return await run.ends(within_s=1800)

    async def report(*options: object) -> RunReport:
        if options not in known:
            known[options] = await train(options)
        return known[options]

    return report
