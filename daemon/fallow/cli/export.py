"""`fallow export`: a checkpoint as one file for plain torch."""

import importlib
import os
from pathlib import Path

import click

from fallow.cli.common import ask, json_option, tell
from fallow.files import write_problem
from fallow.model import CheckpointState, Exit, FallowError, Snapshot
from fallow.text import clean_block, quote
from fallow.worker.checkpoint.manifest import MANIFEST, complete_checkpoints, read_manifest


@click.command(short_help="Write a checkpoint to one file for plain torch.")
@click.argument("run", metavar="RUN|FOLDER")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint.  [default: the newest]")
@json_option
def export(run: str, file: Path, step: int | None, as_json: bool) -> None:
    """Write a checkpoint of RUN to a new FILE, which can be read without Fallow.

    FILE.pt (or .pth) is for torch.load and has all prepared objects. FILE.safetensors has the models' tensors. Without
    a head, name a FOLDER of checkpoints instead of RUN, with a / in it.
    """
    if file.suffix not in (".pt", ".pth", ".safetensors"):
        raise FallowError(f"{file}: the name must end in .pt, .pth or .safetensors", Exit.USAGE)
    if os.path.lexists(file):
        raise FallowError(f"{file} exists and is not replaced; name another file, or remove it", Exit.CANTCREAT)
    if problem := write_problem(file.parent):
        raise FallowError(problem, Exit.CANTCREAT)
    try:
        importlib.import_module("safetensors.torch" if file.suffix == ".safetensors" else "torch")
    except ImportError as error:
        text = f"{file} cannot be written: {error}; use the Python that trains, or pip install 'fallow[torch,export]'"
        raise FallowError(text, Exit.UNAVAILABLE) from None
    from fallow.worker.checkpoint.export import read_state, write_file

    checkpoints = _checkpoints(run)
    folder = next((folder for at, folder in checkpoints if step in (None, at)), None)
    steps = ", ".join(str(at) for at, other in checkpoints if other != folder)
    advice = f"choose from --step: {steps}" if steps else "while a run trains, `fallow checkpoint` writes another"
    if folder is None:
        raise FallowError(f"{quote(run)}: no checkpoint{f' of step {step}' if steps else ''}; {advice}", Exit.NOINPUT)
    try:
        state = read_state(folder)
    except FallowError as error:
        raise FallowError(f"{error.message}; {advice}", error.code) from None
    note = write_file(state, file)
    result = {"file": str(file.absolute()), "step": state["step"], "checkpoint": str(folder), "note": note}
    text = f"{file}: step {state['step']}, from {folder}" + f"\nnote: {note}" * bool(note)
    tell(result, as_json, lambda _: click.echo(clean_block(text)))


def _checkpoints(run: str) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints of a run or in a folder, the preferred one first."""
    if "/" in run or run.startswith("."):
        folder = Path(run)
        if os.path.exists(folder / MANIFEST):
            return [(read_manifest(folder)[0].step, folder)]
        paths = complete_checkpoints(folder)
        if not paths:
            what = "no checkpoint; name the folder checkpoints of a run, or one checkpoint in it"
            raise FallowError(f"{quote(run)}: {what if os.path.isdir(folder) else 'no such folder'}", Exit.NOINPUT)
        return [(int(path.name.rpartition("-s")[2]), path) for path in reversed(paths)]
    try:
        views = ask("status", Snapshot, run=run).runs[0].checkpoints
    except FallowError as error:
        advice = (
            "; or give a folder instead of the run, with a / in it: by default runs/RUN/checkpoints in the state folder"
        )
        text = error.message + advice * (error.code == Exit.UNAVAILABLE or os.path.isdir(run))
        raise FallowError(text, error.code) from None
    ordered = sorted(views, key=lambda view: view.state is not CheckpointState.USABLE)
    return [(view.step, Path(view.path)) for view in ordered]
