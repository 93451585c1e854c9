"""The plan of a `fallow submit`: the meaning of a command line, a script and an environment. Nothing is submitted."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from fallow.core.submission import sbatch
from fallow.core.submission.sbatch_line import (
    CommandLine,
    InForce,
    canonical,
    component_nodes,
    from_environment,
    in_force,
    is_range,
    refuse,
    run_limits,
    text_of,
)
from fallow.core.submission.script import BatchScript, deadline_at, harvest_script, parse_settings
from fallow.model import Exit, FallowError, RunSpec


class Submission(msgspec.Struct, frozen=True):
    """A checked submission. `spec.run` is empty until the head has named the run."""

    spec: RunSpec
    command: tuple[str, ...]
    "options of the first submission: see `sbatch.first_options`"
    warnings: tuple[str, ...]

    def options(self, token: str, exported: Mapping[str, str]) -> list[str]:
        """sbatch's arguments before the script, if sbatch sees the user's environment."""
        return sbatch.base_options(self.command, token=token, exported=exported, first=True)

    def all_options(self, token: str, exported: Mapping[str, str]) -> list[str]:
        """sbatch's arguments before the script, if sbatch does not see the user's environment."""
        return sbatch.base_options(self.spec.sbatch_options, token=token, exported=exported, first=True)

    def has_option(self, name: str) -> bool:
        """Return True if the user gave this option: on the command line, in the script or in the environment."""
        return any(word.partition("=")[0] == f"--{name}" for word in self.spec.sbatch_options)

    @property
    def harvest_script(self) -> str:
        return harvest_script(self.spec.script)


def plan(
    line: CommandLine,
    script: BatchScript,
    *,
    environ: Mapping[str, str],
    cwd: str,
    umask: int,
    now: float,
    min_minutes: int = 2,
) -> Submission:
    """Plan a submission.

    Raises:
        FallowError: something is wrong that can be seen without Slurm and without a head.
    """
    options = in_force(line.components, script.components, from_environment(environ))
    for component in options:
        refuse(component)
    fallow = dict(script.settings)
    for text in line.values_of("fallow"):
        fallow |= parse_settings(text, "--fallow")
    low, high = run_limits(options, fallow.get("nodes"), ranged=any(map(is_range, line.values_of("nodes"))))
    leader = options[0]
    has_size = any("nodes" in component for component in options)
    # In a heterogeneous job every component has its own size; #FALLOW nodes then only bounds the run.
    nodes = "" if has_size or "nodes" not in fallow or len(options) > 1 else str(low)
    size = [f"--nodes={nodes}"] if nodes else []
    base = component_nodes(leader)[0] if "nodes" in leader else low
    spec = RunSpec(
        run="",
        name=text_of(leader, "job-name") if "job-name" in leader else script.name,
        min_nodes=low,
        max_nodes=high,
        workers_per_node=fallow.get("workers-per-node"),
        harvest_partitions=fallow.get("partitions", []),
        script=script.text,
        args=list(line.args),
        sbatch_options=[*canonical([each.values() for each in options]), *size],
        harvest_options=sbatch.inherited_options(leader, base),
        environment=sbatch.captured_environment(environ, text_of(leader, "export") if "export" in leader else "ALL"),
        cwd=_chdir(leader, cwd),
        umask=umask,
        budget_node_hours=fallow.get("budget-node-hours"),
        weight=fallow.get("weight", 1.0),
        deadline_at=deadline_at(fallow["deadline"], now) if "deadline" in fallow else None,
        min_harvest_minutes=fallow.get("min-minutes", min_minutes),
        harvest_account=fallow.get("harvest-account", ""),
        outlives_base="outlive-base" in fallow,
        seed=fallow.get("seed", 0),
        created_at=now,
    )
    command = (*sbatch.first_options(line.components, options), *size)
    return Submission(spec, command, (*script.warnings, *_advice(spec, options, script)))


def _advice(spec: RunSpec, options: Sequence[InForce], script: BatchScript) -> list[str]:
    notes: list[str] = []
    if spec.min_nodes == spec.max_nodes:
        notes.append(
            f"this run stays at {spec.max_nodes} node{'s' if spec.max_nodes > 1 else ''}; "
            "give --nodes=MIN:MAX to let it grow"
        )
    if "fallow run" not in spec.script and "fallow.cli" not in spec.script:
        notes.append(f"{script.name} does not call `fallow run`; unless something it calls does, nothing will train")
    if misplaced := [word for word in spec.args if _FALLOW_OPTION.fullmatch(word)]:
        notes.append(
            f"{' '.join(misplaced)} after {script.name} goes to the script; write Fallow's options before the script"
        )
    if "nodelist" in options[0] or "nodefile" in options[0]:
        notes.append("--nodelist applies to the base job only; harvest jobs run on any suitable node")
    return notes


_FALLOW_OPTION = re.compile(r"--dry-run|--fallow=.*|(--nodes=|-N)\d+:\d+")
"""Words that only `fallow submit` understands."""


def _chdir(leader: InForce, cwd: str) -> str:
    folder = text_of(leader, "chdir")
    if "\0" in folder:
        raise FallowError("--chdir contains a NUL character", Exit.USAGE)
    return folder if folder.startswith("/") else f"{cwd.rstrip('/')}/{folder}" if folder else cwd
