"""From a user's sbatch command to the submissions that Fallow makes: the base job and the harvest jobs."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from fallow.core.checks.devices import VARIABLES
from fallow.core.holes import Part
from fallow.core.neighbour.waiting import PICKS_UP
from fallow.core.submission.sbatch_line import Component, InForce, OptionUse, canonical, number, split, text_of
from fallow.core.submission.sbatch_table import Reach
from fallow.core.submission.script import parse_script
from fallow.model import ID_PATTERN, AllocationKind, Exit, FallowError, RunSpec

HEAD_SETTINGS = "FALLOW_HEAD__"
"""Prefix of variables for the head only, such as the URL of a site's Redis with its password."""

STRIPPED = (
    HEAD_SETTINGS,
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", *VARIABLES),
    *("FALLOW_RUN", "FALLOW_TOKEN", "FALLOW_KIND", "FALLOW_WORKER", "FALLOW_CHANNEL_FD"),
    "FALLOW_OUTPUT_PIPES",
)
"""Prefixes of variables that belong to one job or submission and must not reach another one."""

MEMORY = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))
"""Options about memory. A job on a whole node gets all memory of the node."""

LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TERM")
"""Variables that harvest jobs get even if the user's `--export` passes (nearly) nothing."""

_ID = re.compile(ID_PATTERN)
_PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")

# -- environment of the jobs --------------------------------------------------------------------------------------


def job_environment(state: str, run: str, token: str, kind: AllocationKind) -> dict[str, str]:
    """Variables that `fallow run` reads in the allocation. No secrets: `sacct` shows command lines to everybody."""
    _check_id(run, "run")
    _check_id(token, "token")
    return {
        "FALLOW_STATE_DIR": state,
        "FALLOW_RUN": run,
        "FALLOW_TOKEN": token,
        "FALLOW_KIND": kind.value,
    }


def captured_environment(environ: Mapping[str, str], export: str = "ALL") -> dict[str, str]:
    """The user's environment for harvest jobs. Args: export: value of the base job's `--export`."""
    captured = {name: value for name, value in environ.items() if not name.startswith(STRIPPED)}
    words = [word.partition("=") for word in export.split(",")]
    if words[0][0].upper() != "ALL":
        named = {name for name, _, _ in words if name.upper() not in ("NONE", "NIL")}
        captured = {name: value for name, value in captured.items() if name in named or name in LOGIN_VARIABLES}
    captured |= {name: value for name, equals, value in words if equals}
    if "SLURM_CONF" in environ:
        # The only Slurm variable that names the cluster.
        captured["SLURM_CONF"] = environ["SLURM_CONF"]
    return captured


# -- harvest jobs -------------------------------------------------------------------------------------------------


def inherited_options(options: InForce, nodes: int) -> list[str]:
    """The base job's options that harvest jobs inherit, for one node each.

    Args:
        options: in force for the base job, or for one component of it.
        nodes: number of nodes of that job or component.
    """
    words = [use.canonical for use in options.values() if use.option.reach in (Reach.KEPT, Reach.SHAPE)]
    tasks = max(number(options, "ntasks-per-node") or -(-(number(options, "ntasks") or nodes) // nodes), 1)
    per_task = [entry for entry in text_of(options, "tres-per-task").split(",") if entry]
    gpus = _gpu_counts(options, "gpus-per-node") or _gpus(text_of(options, "gres").split(","))
    if not gpus and (gpus := _gpus_per_node(options, nodes, tasks, per_task)):
        named = ",".join(f"{kind}:{count}" if kind else str(count) for kind, count in gpus.items())
        words.append(f"--gpus-per-node={named}")
    if (per_gpu := number(options, "ntasks-per-gpu")) and gpus:
        tasks = per_gpu * sum(gpus.values())
    if tasks > 1:
        words.append(f"--ntasks-per-node={tasks}")
    words += [f"--cpus-per-task={match[1]}" for entry in per_task if (match := _TRES_CPU.fullmatch(entry))]
    if other_tres := [entry for entry in per_task if not _TRES_CPU.fullmatch(entry) and not _gpus([entry])]:
        words.append(f"--tres-per-task={','.join(other_tres)}")
    if "exclusive" in options:
        words.append(options["exclusive"].canonical)
    exported = text_of(options, "export").split(",")[0].upper()
    if "export" in options and exported not in ("ALL", "NIL") and "get-user-env" not in options:
        # sbatch then loads the login environment on the node; harvest jobs export ALL, so they must ask for it.
        words.append("--get-user-env")
    return words


def _gpus_per_node(options: InForce, nodes: int, tasks: int, per_task: Sequence[str]) -> dict[str, int]:
    """GPUs of one node by type, if the base job counts GPUs per job, task or socket."""
    if gpus := _gpu_counts(options, "gpus"):
        return {kind: max(count // nodes, min(count, 1)) for kind, count in gpus.items()}
    if gpus := _gpu_counts(options, "gpus-per-task"):
        return {kind: count * tasks for kind, count in gpus.items()}
    if gpus := _gpu_counts(options, "gpus-per-socket"):
        layout = text_of(options, "extra-node-info").partition(":")[0]
        sockets = number(options, "sockets-per-node") or (int(layout) if layout.isdecimal() else 1)
        return {kind: count * sockets for kind, count in gpus.items()}
    return {kind: count * tasks for kind, count in _gpus(per_task).items()}


_TRES_CPU = re.compile(r"cpu[:=](\d+)")
_GPU = re.compile(r"(?:gres[/:])?gpu(?::(?P<type>(?!\d+$)[^:=]+))?(?:[:=](?P<count>\d+))?")
"""Entry of `--gres` or `--tres-per-task`: `gpu:2`, `gres/gpu:a100=2`, and `gres:gpu:2` before Slurm 23.11."""


def _gpus(entries: Iterable[str]) -> dict[str, int]:
    matches = [match for entry in entries if (match := _GPU.fullmatch(entry))]
    return {match["type"] or "": int(match["count"] or 1) for match in matches}


def _gpu_counts(options: InForce, name: str) -> dict[str, int]:
    """Value of an option that counts GPUs: `8`, `a100:4,v100:2`."""
    return _gpus(f"gpu:{entry}" for entry in text_of(options, name).split(",") if entry)


def harvest_options(
    spec: RunSpec,
    token: str,
    partition: str,
    minutes: int,
    output: str,
    nice: int,
    qos: str = "",
    account: str = "",
    barred: Sequence[str] = (),
    part: Part | None = None,
    has_normal_priority: bool = False,
) -> list[str]:
    """sbatch options of one harvest job.

    On its node the job takes what the base job takes of each node: the whole node only if the base job is exclusive,
    else the same GPUs, CPUs and memory. `part` replaces this share on a node that other jobs use. The job never
    outlives its hole, is never requeued, and other users' pending jobs come first. Its name is the token, so that the
    head finds the job again if sbatch's answer was lost.

    Args:
        spec, token, partition, minutes, nice: of the job.
        output: may hold sbatch's own patterns (`%j`).
        qos, account: instead of the base job's; empty: the base job's.
        barred: node lists that the job must not use.
        part: share of a node that other jobs use too.
        has_normal_priority: True if other heads give way to this request as to any job.
    """
    _check_id(token, "token")
    if not _PARTITION.fullmatch(partition):
        raise FallowError(f"{partition[:64]!r} is not a partition name; check [harvest] partitions", Exit.CONFIG)
    if minutes < 1:
        raise FallowError(f"a harvest job of {minutes} minutes; at least 1 is needed", Exit.SOFTWARE)
    is_whole_node = part is None and takes_whole_nodes(spec)
    shape = _part(part) if part is not None else {"exclusive": None, "mem": "0"} if is_whole_node else {}
    settings = {
        "export": "ALL",
        "propagate": "NONE",
        "ignore-pbs": None,
        "nodes": "1",
        "no-requeue": None,
        "nice": str(nice),
        "mail-type": "NONE",
        "open-mode": "append",
        "output": output,
        "chdir": spec.cwd or "/",
        "job-name": token,
        "comment": token if has_normal_priority else f"{token} {PICKS_UP}",
        "time": str(minutes),
        "partition": partition,
        **shape,
    }
    settings |= {name: value for name, value in (("qos", qos), ("account", account)) if value}
    words = [OptionUse(name, value).canonical for name, value in settings.items()]
    for word in spec.harvest_options:
        name = word.removeprefix("--").partition("=")[0]
        is_wanted = (
            OptionUse(name).option.reach is Reach.KEPT if part is not None else not is_whole_node or name not in MEMORY
        )
        if name not in settings and is_wanted:
            words.append(word)
    words = _with_excluded(words, barred)
    for word in words:
        if "\0" in word or "\n" in word:
            raise FallowError(f"the sbatch option {word[:64]!r} contains a line end or a NUL character", Exit.DATA)
    return words


def takes_whole_nodes(spec: RunSpec) -> bool:
    """Return True if the base job's nodes run no other job because the user asked for that (`--exclusive`)."""
    return spec.harvest_given.get("exclusive", "shared") in ("", "node", "topo")


def _part(part: Part) -> dict[str, str | None]:
    gpus = f"{part.gpu_type}:{part.gpus}" if part.gpu_type else str(part.gpus)
    memory = {"mem": f"{part.memory_mb}M"} if part.memory_mb else {}
    options: dict[str, str | None] = {
        "ntasks": "1",
        "cpus-per-task": str(part.cpus),
        "gpus-per-node": gpus,
        "nodelist": part.node,
    }
    return options | memory


# -- the base job -------------------------------------------------------------------------------------------------


COMPLETED = ("comment", "export", "requeue", "no-requeue")
"""Options that `base_options` extends or replaces, so it must know them wherever the user gave them."""


def first_options(command: Sequence[Component], in_force: Sequence[InForce]) -> list[str]:
    """sbatch options of a base job's first submission: the user's command line, for `base_options`.

    sbatch itself reads the script and the environment as well. An option of the environment is not copied to the
    command line: there it would override options of the script that exclude it (`--mem` and `--mem-per-cpu`).

    Args:
        command: components of the command line; the last one also serves further components of the script.
        in_force: see `sbatch_line.in_force`.
    """
    components: list[list[OptionUse]] = []
    for index, options in enumerate(in_force):
        uses = command[min(index, len(command) - 1)]
        additions = [options[name] for name in COMPLETED if name in options and options[name] not in uses]
        components.append([*additions, *uses])
    return canonical(components)


def base_options(
    options: Sequence[str],
    *,
    token: str,
    exported: Mapping[str, str],
    barred: Sequence[str] = (),
    first: bool = False,
    by_script: Collection[str] = (),
) -> list[str]:
    """sbatch options of a base job: the user's own, then those that make the job part of its run.

    Fallow's options come last in every component, so they win. Each component repeats the options that stay in force
    for the whole job: on a command line, an option of a later component would hold for earlier components too.

    Args:
        options: the user's options, from `first_options`, or all that are in force, from `RunSpec.sbatch_options`.
        token: of the allocation.
        exported: variables that the job must get.
        barred: node lists that the job must not use.
        first: False if the head submits the job again: options about the first submission are dropped.
        by_script: names of options that the job's script gives.
    """
    _check_id(token, "token")
    words: list[str] = []
    components = split(options).components
    exports = any(use.name == "export" for component in components for use in component)
    for index, component in enumerate(components):
        in_force = {use.name: use for use in component}
        if exports:
            in_force.setdefault("export", OptionUse("export", "ALL"))
        words.extend([":"] if index else [])
        passed_on = (use for use in component if _is_passed_on(use, first=first) and use.name not in by_script)
        words.extend(_with_excluded([use.canonical for use in passed_on], barred))
        words.extend(_run_options(in_force, token, exported))
    return words


def script_options(spec: RunSpec, barred: Sequence[str] = ()) -> frozenset[str]:
    """Names of the options that stay in the script of a base job that the head submits again.

    They are options about the whole job that later components of a heterogeneous job give in the script, and the first
    component does not. On a command line they would hold for the first component too (`sbatch_line.in_force`).

    Args:
        spec: of the run.
        barred: see `base_options`.
    """
    leader, *later_components = split(spec.sbatch_options).components
    leader_names = {use.name for use in leader} | {"job-name", *COMPLETED} | ({"exclude"} if barred else set())
    header = parse_script(spec.script, spec.name).components if later_components else ()
    pairs = ((use, in_force) for own, in_force in zip(header[1:], later_components, strict=False) for use in own)
    later = (use for use, in_force in pairs if use in in_force and use.option.sticky)
    return frozenset(g.name for g in later if g.name not in leader_names and g.option.reach is not Reach.FIRST)


def _is_passed_on(use: OptionUse, *, first: bool) -> bool:
    """Return False for options that `_joining` replaces, and for options that sbatch must not see."""
    if use.option.reach is Reach.FIRST:
        return first and use.name not in ("parsable", "quiet")
    return use.name not in ("comment", "export")


def _with_excluded(words: Sequence[str], barred: Sequence[str]) -> list[str]:
    """The options of one job or component, with `barred` added to the nodes that the user excluded."""
    if not barred:
        return list(words)
    excluded = [word.partition("=")[2] for word in words if word.startswith("--exclude=")]
    other_words = [word for word in words if not word.startswith("--exclude=")]
    return [*other_words, "--exclude=" + ",".join([*excluded[-1:], *barred])]


def _run_options(options: InForce, token: str, variables: Mapping[str, str]) -> list[str]:
    comment = text_of(options, "comment")
    words = [f"--comment={comment} {token}" if comment else f"--comment={token}"]
    if "requeue" not in options and "no-requeue" not in options:
        # A run outlives its base job. A requeued base job would train the same run from an older state.
        words.append("--no-requeue")
    if "export" in options:
        # Our variables by name; sbatch takes the values from its environment.
        exported = text_of(options, "export").split(",")
        if exported[0].upper() != "ALL":
            exported = [*([] if exported[0].upper() in ("NONE", "NIL", "") else exported), *variables]
        words.append(f"--export={','.join(exported)}")
    return words


def _check_id(text: str, what: str) -> None:
    if not _ID.fullmatch(text):
        raise FallowError(f"{text[:64]!r} is not a valid {what}: {ID_PATTERN}", Exit.SOFTWARE)
