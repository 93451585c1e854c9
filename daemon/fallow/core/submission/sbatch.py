"""From a user's sbatch command to the submissions that Fallow makes: the base job and the harvest jobs."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from fallow.core.checks.devices import VARIABLES
from fallow.core.holes import Part
from fallow.core.neighbour.waiting import PICKS_UP
from fallow.core.submission.sbatch_line import Component, Given, InForce, canonical, number, split, text_of
from fallow.core.submission.sbatch_table import Reach
from fallow.core.submission.script import parse_script
from fallow.model import ID_PATTERN, AllocationKind, Exit, FallowError, RunSpec

HEAD_SETTINGS = "FALLOW_HEAD__"
"""Beginning of variables for the head alone, such as the URL of a site's Redis with its password."""

STRIPPED = (
    HEAD_SETTINGS,
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", *VARIABLES),
    *("FALLOW_RUN", "FALLOW_TOKEN", "FALLOW_KIND", "FALLOW_WORKER", "FALLOW_CHANNEL_FD"),
    "FALLOW_OUTPUT_PIPES",
)
"""Beginnings of variables that belong to a job or a submission and must not reach another one."""

MEMORY = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))
"""Options about memory; a job on a whole node gets all that the node has."""

LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TERM")
"""What a harvest job gets of the environment where the user asked sbatch to export (nearly) nothing."""

_ID = re.compile(ID_PATTERN)
_PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")

# -- what jobs are told -------------------------------------------------------------------------------------------


def job_environment(state: str, run: str, token: str, kind: AllocationKind) -> dict[str, str]:
    """What `fallow run` reads in the allocation. No secret is among it: `sacct` shows command lines to all."""
    _check_id(run, "run")
    _check_id(token, "token")
    return {
        "FALLOW_STATE_DIR": state,
        "FALLOW_RUN": run,
        "FALLOW_TOKEN": token,
        "FALLOW_KIND": kind.value,
    }


def captured_environment(environ: Mapping[str, str], export: str = "ALL") -> dict[str, str]:
    """The user's environment as harvest jobs get it; `export` is what `--export` said for the base job."""
    kept = {name: value for name, value in environ.items() if not name.startswith(STRIPPED)}
    words = [word.partition("=") for word in export.split(",")]
    if words[0][0].upper() != "ALL":
        named = {name for name, _, _ in words if name.upper() not in ("NONE", "NIL")}
        kept = {name: value for name, value in kept.items() if name in named or name in LOGIN_VARIABLES}
    kept |= {name: value for name, equals, value in words if equals}
    if "SLURM_CONF" in environ:
        # The one Slurm variable that says which cluster is meant.
        kept["SLURM_CONF"] = environ["SLURM_CONF"]
    return kept


# -- harvest jobs -------------------------------------------------------------------------------------------------


def reaching_harvest(options: InForce, nodes: int) -> list[str]:
    """The base job's options that harvest jobs get too, for one node each.

    Args:
        options: in force for the base job, or for one component of it.
        nodes: number of nodes of that job or component.
    """
    kept = [given.canonical for given in options.values() if given.option.reach in (Reach.KEPT, Reach.SHAPE)]
    tasks = max(number(options, "ntasks-per-node") or -(-(number(options, "ntasks") or nodes) // nodes), 1)
    per_task = [entry for entry in text_of(options, "tres-per-task").split(",") if entry]
    gpus = _counted(options, "gpus-per-node") or _gpus(text_of(options, "gres").split(","))
    if not gpus and (gpus := _gpus_per_node(options, nodes, tasks, per_task)):
        named = ",".join(f"{kind}:{count}" if kind else str(count) for kind, count in gpus.items())
        kept.append(f"--gpus-per-node={named}")
    if (per_gpu := number(options, "ntasks-per-gpu")) and gpus:
        tasks = per_gpu * sum(gpus.values())
    if tasks > 1:
        kept.append(f"--ntasks-per-node={tasks}")
    kept += [f"--cpus-per-task={match[1]}" for entry in per_task if (match := _TRES_CPU.fullmatch(entry))]
    if others := [entry for entry in per_task if not _TRES_CPU.fullmatch(entry) and not _gpus([entry])]:
        kept.append(f"--tres-per-task={','.join(others)}")
    if "exclusive" in options:
        kept.append(options["exclusive"].canonical)
    exported = text_of(options, "export").split(",")[0].upper()
    if "export" in options and exported not in ("ALL", "NIL") and "get-user-env" not in options:
        # sbatch then loads the login environment on the node; harvest jobs export ALL, so they must ask for it.
        kept.append("--get-user-env")
    return kept


def _gpus_per_node(options: InForce, nodes: int, tasks: int, per_task: Sequence[str]) -> dict[str, int]:
    """GPUs of one node, by type, where the base job counts them for the whole job, a task or a socket."""
    if gpus := _counted(options, "gpus"):
        return {kind: max(count // nodes, min(count, 1)) for kind, count in gpus.items()}
    if gpus := _counted(options, "gpus-per-task"):
        return {kind: count * tasks for kind, count in gpus.items()}
    if gpus := _counted(options, "gpus-per-socket"):
        layout = text_of(options, "extra-node-info").partition(":")[0]
        sockets = number(options, "sockets-per-node") or (int(layout) if layout.isdecimal() else 1)
        return {kind: count * sockets for kind, count in gpus.items()}
    return {kind: count * tasks for kind, count in _gpus(per_task).items()}


_TRES_CPU = re.compile(r"cpu[:=](\d+)")
_GPU = re.compile(r"(?:gres[/:])?gpu(?::(?P<type>(?!\d+$)[^:=]+))?(?:[:=](?P<count>\d+))?")
"""Entry of `--gres` or `--tres-per-task`: `gpu:2`, `gres/gpu:a100=2`, and `gres:gpu:2` before Slurm 23.11."""


def _gpus(entries: Iterable[str]) -> dict[str, int]:
    found = [match for entry in entries if (match := _GPU.fullmatch(entry))]
    return {match["type"] or "": int(match["count"] or 1) for match in found}


def _counted(options: InForce, name: str) -> dict[str, int]:
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
    hurried: bool = False,
) -> list[str]:
    """sbatch options of one harvest job. `output` may hold sbatch's own patterns (`%j`).

    The job takes as much of one node as the base job takes of each of its nodes: a whole node only where the base job
    is exclusive, else the GPUs, CPUs and memory that it asks for. `part` says otherwise for a node that others use.
    The job never outlives its hole, is never requeued, and gives way to everybody else's pending jobs. Its name is the
    token, by which it is found again when sbatch's answer was lost.

    Args:
        spec, token, partition, minutes, output, nice: what the names say.
        qos, account: instead of the base job's; empty: those.
        barred: node lists that it must not take.
        part: GPUs of a node that other jobs use too.
        hurried: it is asked for with normal priority, so other heads give way to it as to any job.
    """
    _check_id(token, "token")
    if not _PARTITION.fullmatch(partition):
        raise FallowError(f"{partition[:64]!r} is no partition name; check [harvest] partitions", Exit.CONFIG)
    if minutes < 1:
        raise FallowError(f"a harvest job of {minutes} minutes; at least 1 is needed", Exit.SOFTWARE)
    whole = part is None and takes_whole_nodes(spec)
    shape = _part(part) if part is not None else {"exclusive": None, "mem": "0"} if whole else {}
    own = {
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
        "comment": token if hurried else f"{token} {PICKS_UP}",
        "time": str(minutes),
        "partition": partition,
        **shape,
    }
    own |= {name: value for name, value in (("qos", qos), ("account", account)) if value}
    words = [Given(name, value).canonical for name, value in own.items()]
    for word in spec.harvest_options:
        name = word.removeprefix("--").partition("=")[0]
        is_wanted = Given(name).option.reach is Reach.KEPT if part is not None else not whole or name not in MEMORY
        if name not in own and is_wanted:
            words.append(word)
    words = _without(words, barred)
    for word in words:
        if "\0" in word or "\n" in word:
            raise FallowError(f"the sbatch option {word[:64]!r} holds a line end or NUL", Exit.DATA)
    return words


def takes_whole_nodes(spec: RunSpec) -> bool:
    """Return True if the base job's nodes run no other job, because its owner said so (`--exclusive`)."""
    return spec.harvest_given.get("exclusive", "shared") in ("", "node", "topo")


def _part(part: Part) -> dict[str, str | None]:
    gpus = f"{part.gpu_type}:{part.gpus}" if part.gpu_type else str(part.gpus)
    memory = {"mem": f"{part.memory_mb}M"} if part.memory_mb else {}
    one: dict[str, str | None] = {
        "ntasks": "1",
        "cpus-per-task": str(part.cpus),
        "gpus-per-node": gpus,
        "nodelist": part.node,
    }
    return one | memory


# -- the base job -------------------------------------------------------------------------------------------------


COMPLETED = ("comment", "export", "requeue", "no-requeue")
"""What `base_options` adds to or replaces, and so must know wherever it was given."""


def first_options(command: Sequence[Component], in_force: Sequence[InForce]) -> list[str]:
    """sbatch options of a base job's first submission: the user's command line as it is, for `base_options`.

    sbatch reads the script and its own environment beside them. On the command line, an option of the environment
    would no longer give way to those of the script that rule it out (`--mem` and `--mem-per-cpu`).

    Args:
        command: components of the command line; the last one also serves further components of the script.
        in_force: see `sbatch_line.in_force`.
    """
    components: list[list[Given]] = []
    for index, options in enumerate(in_force):
        given = command[min(index, len(command) - 1)]
        completed = [options[name] for name in COMPLETED if name in options and options[name] not in given]
        components.append([*completed, *given])
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
    """sbatch options of a base job: the user's own, and what makes it part of its run.

    Ours come last in every component, so they hold. Each component says those that stay in force for the whole job: on
    a command line what a later one alone says would hold for earlier ones, too.

    Args:
        options: of the user, from `first_options`; or `RunSpec.sbatch_options`: all that are in force.
        token: of the allocation.
        exported: variables that the job must get.
        barred: node lists that it must not take.
        first: False: the head submits the job again, so what meant the first submission does not count.
        by_script: names of options that its script says.
    """
    _check_id(token, "token")
    words: list[str] = []
    components = split(options).components
    exports = any(given.name == "export" for component in components for given in component)
    for index, component in enumerate(components):
        in_force = {given.name: given for given in component}
        if exports:
            in_force.setdefault("export", Given("export", "ALL"))
        words.extend([":"] if index else [])
        passed_on = (given for given in component if _is_passed_on(given, first=first) and given.name not in by_script)
        words.extend(_without([given.canonical for given in passed_on], barred))
        words.extend(_joining(in_force, token, exported))
    return words


def said_later(spec: RunSpec, barred: Sequence[str] = ()) -> frozenset[str]:
    """Names of the options that stay in the script of a base job that is submitted again.

    They are about the whole job, and later components of a heterogeneous job say them in the script, but the first one
    does not: on a command line they would hold for that one, too (`sbatch_line.in_force`).

    Args:
        spec: of the run.
        barred: see `base_options`.
    """
    leader, *others = split(spec.sbatch_options).components
    said = {given.name for given in leader} | {"job-name", *COMPLETED} | ({"exclude"} if barred else set())
    header = parse_script(spec.script, spec.name).components if others else ()
    pairs = ((given, in_force) for own, in_force in zip(header[1:], others, strict=False) for given in own)
    later = (given for given, in_force in pairs if given in in_force and given.option.sticky)
    return frozenset(g.name for g in later if g.name not in said and g.option.reach is not Reach.FIRST)


def _is_passed_on(given: Given, *, first: bool) -> bool:
    """Return False for what `_joining` replaces, and for what sbatch must not see."""
    if given.option.reach is Reach.FIRST:
        return first and given.name not in ("parsable", "quiet")
    return given.name not in ("comment", "export")


def _without(words: Sequence[str], barred: Sequence[str]) -> list[str]:
    """The options of one (component of a) job, with these nodes excluded besides those that the user excluded."""
    if not barred:
        return list(words)
    given = [word.partition("=")[2] for word in words if word.startswith("--exclude=")]
    rest = [word for word in words if not word.startswith("--exclude=")]
    return [*rest, "--exclude=" + ",".join([*given[-1:], *barred])]


def _joining(options: InForce, token: str, variables: Mapping[str, str]) -> list[str]:
    comment = text_of(options, "comment")
    words = [f"--comment={comment} {token}" if comment else f"--comment={token}"]
    if "requeue" not in options and "no-requeue" not in options:
        # A run outlives its base job; a restarted one would only train the same run from a worse place.
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
        raise FallowError(f"{text[:64]!r} is no {what}: {ID_PATTERN}", Exit.SOFTWARE)
