"""Workers of a node on the processors next to their GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from fallow.worker.transport.affinity import bind

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Processors 0 to 7, whatever this machine has."""
    has = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(has))

    def take(_: int, wanted: set[int]) -> None:
        has.clear()
        has.update(wanted)

    monkeypatch.setattr(os, "sched_setaffinity", take)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    module = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return has


def kernel(folder: Path, text: str) -> Path:
    (folder / "0000:41:00.0").mkdir()
    (folder / "0000:41:00.0" / "local_cpulist").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4-6,64-66\n", {4, 5, 6}),
        ("7\n", {7}),
        ("64-80\n", set(range(8))),
        ("\n", set(range(8))),
    ],
)
def test_it_has_those_of_its_job_that_are_near(tmp_path: Path, allowed: set[int], text: str, wanted: set[int]) -> None:
    assert bind(DEVICE, 2, kernel(tmp_path, text)) == wanted
    assert allowed == wanted


def test_it_keeps_what_it_has_alone_or_without_an_answer(tmp_path: Path, allowed: set[int]) -> None:
    assert bind(DEVICE, 1, kernel(tmp_path, "4-6\n")) == set(range(8))
    assert bind(torch.device("cpu"), 2, tmp_path) == set(range(8))
    assert bind(DEVICE, 2, tmp_path / "nothing") == set(range(8))
    assert allowed == set(range(8))
