"""What a node says of its GPUs and of its network: the kernel's files, and torch."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fallow.core.checks.gpu_checks import Link, NodeFacts
from fallow.worker.transport import communicators

_VARIABLE = re.compile(r"(NCCL|RCCL|TORCH_NCCL|GLOO_SOCKET|UCX|FI)_\w+")
_DRIVERS = (("nvidia", "NVIDIA"), ("amdgpu", "AMD"), ("xe", "Intel"))
"""Kernel modules, each with a `version` where it was not built with the kernel."""
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
_RATE = re.compile(r"([0-9.]+) Gb/sec")


def look_around(node: str, devices: Iterable[torch.device], root: Path = Path("/")) -> NodeFacts:
    """What there is.

    Args:
        node: its name.
        devices: that this node's workers use.
        root: of the file system.
    """
    used = list(devices)
    return NodeFacts(
        node=node,
        devices=[_name(device) for device in used if device.type != "cpu"],
        driver=_driver(root),
        runtime=_runtime(),
        library=_library(),
        communicator=communicators.choice(used[0]),
        links=[*_infiniband(root), *_ethernet(root)],
        peer_memory=_peer_memory(root),
        variables=_variables(os.environ),
        compiling=_compiling(root),
    )


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


def _infiniband(root: Path) -> list[Link]:
    """Ports of cards with verbs that are up: InfiniBand, RoCE, Omni-Path (kernel's ABI, sysfs-class-infiniband)."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = _RATE.match(_text(port / "rate"))
        if "ACTIVE" in _text(port / "state") and rate is not None:
            found.append(Link(f"{port.parents[1].name}:{port.name}", "infiniband", float(rate[1])))
    return found


def _ethernet(root: Path) -> list[Link]:
    """Interfaces that are up and tell a speed; bridges and virtual ones do not, or have no device."""
    found = []
    for interface in sorted((root / "sys/class/net").glob("*")):
        speed = _text(interface / "speed")
        if (interface / "device").exists() and _text(interface / "operstate") == "up" and speed.isdecimal():
            found.append(Link(interface.name, "ethernet", int(speed) / 1000))
    return found


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


def _compiling(root: Path) -> list[str]:
    """What is missing: Triton builds an extension of Python (`triton/runtime/build.py`)."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    has_header = (root / header.relative_to("/")).exists()
    return ([] if compiler else ["a C compiler"]) + ([] if has_header else [str(header)])


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environ.items()) if _VARIABLE.fullmatch(name)}


def _text(path: Path) -> str:
    """Of a small file of the kernel; empty: there is none, or it cannot tell (`speed` of an interface that is down)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
