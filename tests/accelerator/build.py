"""Compiles the device once per machine, torch version and source."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import platformdirs
import torch

_SOURCE = Path(__file__).parent / "native"
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


class Unavailable(Exception):
    """The device cannot be built here."""


def library() -> Path:
    """Return the shared library of the device; compile it if the cache has none for this source and this torch.

    Raises:
        Unavailable: there is no C++ compiler, or it fails.
    """
    built = _cache() / f"fake-{torch.__version__}-{_digest()}.so"
    if built.exists():
        return built
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Unavailable(
            "the fake accelerator needs g++ (Debian and Ubuntu: apt install g++), or CXX to name a compiler"
        )
    built.parent.mkdir(parents=True, exist_ok=True)
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles, and the others wait for it
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, built: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    unfinished = built.with_suffix(f".{os.getpid()}")
    command = [
        *(compiler, *_OPTIONS, f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-I{_SOURCE}"),
        *(str(_SOURCE / "fake.cpp"), "-o", str(unfinished), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise Unavailable(f"{compiler} cannot build the fake accelerator:\n{done.stderr[-2000:]}")
    unfinished.rename(built)


def _cache() -> Path:
    return platformdirs.user_cache_path("fallow") / "accelerator"


def _digest() -> str:
    digest = hashlib.sha256(" ".join(_OPTIONS).encode())
    for file in sorted(_SOURCE.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
