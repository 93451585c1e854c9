"""Fixtures of the elastic scenarios."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from elastic_rig import MakeRig, Rig, Undisturbed

from fallow.model import RunReport
from nursery_client import NurseryClient


@pytest.fixture
def make_rig(nursery: NurseryClient, tmp_path: Path, undisturbed: Undisturbed) -> MakeRig:
    """`make_rig(membership__lease_s=1.5)`: a head over a folder of its own, to be entered."""

    def make(**config: object) -> Rig:
        folder = tmp_path / "rig"
        folder.mkdir(mode=0o700)
        return Rig(nursery, folder, undisturbed, **config)

    return make


@pytest.fixture(scope="session")
def undisturbed(nursery: NurseryClient, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Report of the same training by one member to which nothing happens; each is run once."""
    known: dict[tuple[object, ...], RunReport] = {}

    async def report(*options: object) -> RunReport:
        options = without_pace(options)
        if options not in known:
            async with Rig(nursery, tmp_path_factory.mktemp("undisturbed")) as rig:
                run = await (await rig.run(*options, "--pace", 0)).begin(1)
                known[options] = await run.ends(within_s=1800)
        return known[options]

    return report


def without_pace(options: tuple[object, ...]) -> tuple[object, ...]:
    at = options.index("--pace") if "--pace" in options else len(options)
    return options[:at] + options[at + 2 :]
