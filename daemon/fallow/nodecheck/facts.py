"""Facts about a node's GPUs and network, from the kernel's files and torch."""

import os
import re
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from fallow.core.checks.gpu_checks import NodeFacts
from fallow.worker.transport import communicators

_VARIABLE = re.compile(r"(NCCL|RCCL|TORCH_NCCL|GLOO_SOCKET|UCX|FI)_\w+")
_DRIVERS = (("nvidia", "NVIDIA"), ("amdgpu", "AMD"), ("xe", "Intel"))
"""Kernel module and vendor. A module has a `version` file unless it was built with the kernel."""
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
_RATE = re.compile(r"([0-9.]+) Gb/sec")


def look_around(node: str, devices: Iterable[torch.device], root: Path = Path("/")) -> NodeFacts:
    """Return the facts about this node.

    Args:
        node: name of the node.
        devices: devices of this node's workers.
        root: root of the file system.
    """
    device_list = list(devices)
    driver, runtime, missing, links = _driver(root), _runtime(), _missing(root), _links(root)
    findings = {
        "driver": driver or "none is loaded",
        "torch": f"for {runtime or 'processors only'}",
        "torch.compile": f"{' and '.join(missing)} missing" if missing else "finds a C compiler and Python.h",
        "collectives": _library() or "no library for GPUs in this torch",
        "gradients": communicators.choice(device_list[0]),
        "network": ", ".join(link.text for link in links) or "no interface with a known rate",
        "GPUDirect": _peer_memory(root) or "not seen (NCCL_DEBUG=INFO tells what is used)",
    }
    if variables := [f"{name}={value}" for name, value in sorted(os.environ.items()) if _VARIABLE.fullmatch(name)]:
        findings["variables"] = " ".join(variables)
    fixes = {}
    if driver and not runtime:
        fixes["torch"] = "install a build of torch for these GPUs: https://pytorch.org/get-started"
    if missing:
        fixes["torch.compile"] = "install a C compiler and Python's headers (Debian and Ubuntu: gcc, python3-dev)"
    names = [_name(device) for device in device_list if device.type != "cpu"]
    # The rate of all InfiniBand ports, or of the fastest interface on a node without InfiniBand.
    cards = [link.gbit_s for link in links if link.kind == "infiniband"]
    rate = sum(cards) or max((link.gbit_s for link in links), default=0.0)
    return NodeFacts(node=node, devices=names, rate_gbit_s=rate, findings=findings, fixes=fixes)


class Link(NamedTuple):
    """A network interface that is up."""

    name: str
    kind: str
    "infiniband (also RoCE and Slingshot's verbs) or ethernet"
    gbit_s: float

    @property
    def text(self) -> str:
        return f"{self.name} {self.gbit_s:g} Gbit/s {self.kind}"


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def _driver(root: Path) -> str:
    for module, maker in _DRIVERS:
        folder = root / "sys/module" / module
        if folder.is_dir():
            return f"{maker} {_text(folder / 'version') or 'of the kernel ' + os.uname().release}"
    return ""


def _runtime() -> str:
    for name, words in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "oneAPI")):
        version = getattr(torch.version, name, None)
        if version:
            return f"{words} {version}"
    return ""


def _library() -> str:
    if not torch.distributed.is_nccl_available():
        return ""
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {version}"


def _links(root: Path) -> list[Link]:
    links = []
    # Ports of cards with verbs that are up: InfiniBand, RoCE, Omni-Path (kernel's ABI, sysfs-class-infiniband).
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = _RATE.match(_text(port / "rate"))
        if "ACTIVE" in _text(port / "state") and rate is not None:
            links.append(Link(f"{port.parents[1].name}:{port.name}", "infiniband", float(rate[1])))
    # Interfaces that are up and have a speed. Bridges and virtual interfaces have no speed or no device.
    for interface in sorted((root / "sys/class/net").glob("*")):
        speed = _text(interface / "speed")
        if (interface / "device").exists() and _text(interface / "operstate") == "up" and speed.isdecimal():
            links.append(Link(interface.name, "ethernet", int(speed) / 1000))
    return links


def _peer_memory(root: Path) -> str:
    for name in _PEER_MEMORY:
        if (root / "sys/module" / name).is_dir():
            return f"kernel module {name}"
    if (root / "sys/module/amdgpu").is_dir():
        return "amdgpu's own"
    # The open kernel modules export memory as DMA-BUF, which NCCL prefers since 2.12 on kernels since 5.12.
    if "Open Kernel Module" in _text(root / "proc/driver/nvidia/version"):
        return "DMA-BUF of NVIDIA's open kernel modules"
    return ""


def _missing(root: Path) -> list[str]:
    """Missing tools of torch.compile: Triton compiles a Python extension (`triton/runtime/build.py`)."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    has_header = (root / header.relative_to("/")).exists()
    return ([] if compiler else ["a C compiler"]) + ([] if has_header else [str(header)])


def _text(path: Path) -> str:
    """Content of a small kernel file; empty: no file, or unreadable (`speed` of an interface that is down)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
