"""Turns a checkpoint into one file that plain torch or safetensors reads: `fallow export`."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from fallow.model import Exit, FallowError
from fallow.worker.checkpoint.manifest import read_manifest
from fallow.worker.checkpoint.restore import load


def read_state(folder: Path) -> dict[str, Any]:
    """Return `step`, `epoch`, and lists of the prepared objects' `state_dict`s by kind. Raises as `load` does."""
    manifest, tree = read_manifest(folder)[0], load(folder)
    models = tree["objects"]["models"]
    for info in manifest.tensors:
        match info.path:
            case ["models", int(number), key]:
                models[number].update({alias[-1]: models[number][key] for alias in info.aliases})
            case ["transient", int(number), key]:
                del models[number][key]
    for name, value in tree["extra"].items():
        _, number, key = name.split(".", 2)
        models[int(number)][key] = value
    objects = {kind: tree["objects"][kind] for kind in ("models", "optimizers", "others", "dicts")}
    return {"step": manifest.step, "epoch": manifest.epoch, **objects}


def write_file(state: dict[str, Any], file: Path) -> str:
    """Write the result of `read_state` to a new file, and return a note for the file's readers, which may be empty."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        note = (_write_safetensors if file.suffix == ".safetensors" else _write_torch)(state, temporary)
        temporary.chmod(mode)  # safetensors makes another file, closed to others
        if os.path.lexists(file):
            raise FileExistsError(errno.EEXIST, "somebody has made this file meanwhile")
        temporary.rename(file)
        return note
    except Exception as error:
        # torch hides the operating system's reason behind a RuntimeError of its own.
        reason = error if isinstance(error, OSError) else error.__context__ or error
        why = getattr(reason, "strerror", None) or f"{type(reason).__name__} {reason}"
        raise FallowError(f"{file} cannot be written: {why}", Exit.IOERR) from error
    finally:
        if os.path.lexists(temporary):  # never if its name is too long
            temporary.unlink()


def _write_torch(state: dict[str, Any], file: Path) -> str:
    state = dict(state)
    for kind in ("model", "optimizer"):
        if len(state[f"{kind}s"]) == 1:
            state[kind] = state.pop(f"{kind}s")[0]
    with file.open("wb") as target:
        torch.save(state, target)
    types = ", ".join(sorted(get_unsafe_globals_in_checkpoint(file)))
    return types and f"torch.load needs weights_only=False, because the state holds {types}"


def _write_safetensors(state: dict[str, Any], file: Path) -> str:
    """Write each tensor of the models once, as `safetensors.torch.save_model` does: metadata have its further names."""
    from safetensors.torch import save_file

    several = len(state["models"]) > 1
    values = {f"{n}." * several + key: value for n, model in enumerate(state["models"]) for key, value in model.items()}
    names = {id(value): name for name, value in reversed(values.items()) if isinstance(value, torch.Tensor)}
    further_names = {name: names[id(value)] for name, value in values.items() if names.get(id(value), name) != name}
    save_file({name: values[name].contiguous() for name in names.values()}, file, {"format": "pt", **further_names})
    left_out = ", ".join(name for name, value in values.items() if id(value) not in names)
    return left_out and f"left out, because safetensors holds tensors only: {left_out}"
