"""`fallow submit` without doing it: what a command line, a script and an environment amount to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from fallow.core.submission import sbatch
from fallow.core.submission.deadline import deadline_at
from fallow.core.submission.sbatch_line import (
    CommandLine,
    Given,
    canonical,
    from_environment,
    in_force,
    is_range,
    parse_nodes,
    refuse,
    run_limits,
)
from fallow.core.submission.script import BatchScript, harvest_script, parse_settings, typed_settings
from fallow.model import Exit, FallowError, RunSpec


class Submission(msgspec.Struct, frozen=True):
    """A submission, thought through. `spec.run` is empty until the head has named the run."""

    spec: RunSpec
    command: tuple[str, ...]
    "options of the first submission: see `sbatch.first_options`"
    warnings: tuple[str, ...]

    def options(self, token: str, exported: Mapping[str, str]) -> list[str]:
        """sbatch's words before the script."""
        return sbatch.base_options(self.command, token=token, exported=exported, first=True)

    def all_options(self, token: str, exported: Mapping[str, str]) -> list[str]:
        """sbatch's words where it does not see the user's environment."""
        return sbatch.base_options(self.spec.sbatch_options, token=token, exported=exported, first=True)

    def asked(self, name: str) -> bool:
        """Return True if this option was given, wherever."""
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
    """Checks everything that can be checked without Slurm or a head; raises FallowError for what is wrong."""
    options = in_force(line.components, script.components, from_environment(environ))
    for component in options:
        refuse(component)
    settings = dict(script.settings)
    for part in line.components:
        for given in part:
            if given.name == "fallow":
                settings |= parse_settings(given.value or "", "--fallow")
    fallow = typed_settings(settings, script.name)
    ranged = any(given.name == "nodes" and is_range(given.value or "") for part in line.components for given in part)
    low, high = run_limits(options, fallow.get("nodes"), ranged)
    leader = options[0]
    sized = any("nodes" in component for component in options)
    # In a heterogeneous job every component has its own size; #FALLOW nodes then only bounds the run.
    nodes = "" if sized or "nodes" not in fallow or len(options) > 1 else str(low)
    size = [f"--nodes={nodes}"] if nodes else []
    base = parse_nodes(leader["nodes"].value or "").minimum if "nodes" in leader else low
    export = leader.get("export")
    spec = RunSpec(
        run="",
        name=_name(leader, script),
        min_nodes=low,
        max_nodes=high,
        workers_per_node=fallow.get("workers-per-node"),
        harvest_partitions=fallow.get("partitions", []),
        script=script.text,
        args=list(line.args),
        sbatch_options=[*canonical([each.values() for each in options]), *size],
        harvest_options=sbatch.reaching_harvest(leader, base),
        environment=sbatch.captured_environment(environ, export.value if export else None),
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


def _advice(spec: RunSpec, options: Sequence[Mapping[str, Given]], script: BatchScript) -> list[str]:
    notes: list[str] = []
    if spec.min_nodes == spec.max_nodes:
        notes.append(
            f"this run stays at {spec.max_nodes} node{'s' if spec.max_nodes > 1 else ''}; "
            "give --nodes=MIN:MAX to let it grow"
        )
    if "fallow run" not in spec.script and "fallow.cli" not in spec.script:
        notes.append(f"{script.name} does not call `fallow run`; unless something it calls does, nothing will train")
    if late := [word for word in spec.args if _OURS.fullmatch(word)]:
        notes.append(f"{' '.join(late)} after {script.name} is for the script alone; options of ours stand before it")
    if "nodelist" in options[0] or "nodefile" in options[0]:
        notes.append("--nodelist holds for the base job alone; harvest jobs go to any suitable node")
    return notes


_OURS = re.compile(r"--dry-run|--fallow=.*|(--nodes=|-N)\d+:\d+")
"""Words that only `fallow submit` understands."""


def _name(leader: Mapping[str, Given], script: BatchScript) -> str:
    given = leader.get("job-name")
    return (given.value or "") if given is not None else script.name


def _chdir(leader: Mapping[str, Given], cwd: str) -> str:
    given = leader.get("chdir")
    if given is None or not given.value:
        return cwd
    if "\0" in given.value:
        raise FallowError("--chdir holds a NUL character", Exit.USAGE)
    return given.value if given.value.startswith("/") else f"{cwd.rstrip('/')}/{given.value}"
