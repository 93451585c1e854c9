"""Splitting an sbatch command line the way sbatch does, and saying what it means for a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fallow.core.submission.sbatch_table import ALIASES, BY_LONG, BY_SHORT, OPTIONS, Option, Reach, Value
from fallow.model import Exit, FallowError, RunSpec


class Given(msgspec.Struct, frozen=True):
    """One option as it was given. `value` is None for a flag or where an optional value was left out."""

    name: str
    value: str | None = None

    @property
    def canonical(self) -> str:
        """`--long` or `--long=value`: one word, whatever the value is."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"

    @property
    def option(self) -> Option:
        """Its row in the table; an option that is not there is a site plugin's (see `_find`)."""
        return BY_LONG.get(self.name) or _plugin(self.name)


Component = tuple[Given, ...]
"""The options of one job, or of one component of a heterogeneous job."""


class CommandLine(msgspec.Struct, frozen=True):
    components: tuple[Component, ...]
    script: str | None
    args: tuple[str, ...]

    def last(self, name: str) -> Given | None:
        """The last time that an option was given, in whatever component."""
        return next(
            (given for part in reversed(self.components) for given in reversed(part) if given.name == name), None
        )


class Limits(msgspec.Struct, frozen=True):
    """How many nodes: what the base job asks for, and between what the run may move."""

    base: str
    "for sbatch's --nodes; empty: not given"
    minimum: int
    maximum: int


# ---------------------------------------------------------------------------------------------------------------
# Splitting
# ---------------------------------------------------------------------------------------------------------------


def split(argv: Sequence[str]) -> CommandLine:
    """`(options, script, args)` as sbatch has them: the first word that is no option is the script.

    `:` separates the components of a heterogeneous job; sbatch drops it wherever it stands, and so do we.
    """
    components: list[Component] = []
    current: list[Given] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == ":":
            components.append(tuple(current))
            current = []
            position += 1
            continue
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        following = argv[position + 1] if position + 1 < len(argv) else None
        given, used = _long(word, following) if word.startswith("--") else _cluster(word, following)
        current.extend(given)
        position += used
    components.append(tuple(current))
    rest = [word for word in argv[position:] if word != ":"]
    return CommandLine(tuple(components), rest[0] if rest else None, tuple(rest[1:]))


def parse_options(words: Sequence[str], where: str) -> Component:
    """Options alone, e.g. of a `#SBATCH` line; a word that is none is refused as sbatch does."""
    try:
        line = split(words)
    except FallowError as error:
        raise FallowError(f"{where}: {error.message}", error.code) from error
    if line.script is not None:
        raise FallowError(f"{where}: {line.script!r} is no sbatch option", Exit.DATA)
    for given in line.components[0]:
        if given.option.reach is Reach.OWN:
            raise FallowError(f"{where}: sbatch does not know --{given.name}; write a #FALLOW line", Exit.DATA)
        if given.name == "nodes" and is_range(given.value or ""):
            text = f"{where}: sbatch does not know --nodes={given.value}; write `#FALLOW nodes={given.value}`"
            raise FallowError(text, Exit.DATA)
    return line.components[0]


def _long(word: str, following: str | None) -> tuple[list[Given], int]:
    name, equals, value = word[2:].partition("=")
    option = _find(name, bool(equals))
    if option.value is Value.NONE:
        if equals:
            raise _usage(f"--{option.long} takes no value, {word!r} gives one")
        return [Given(_canonical(option))], 1
    if equals:
        return [Given(_canonical(option), value)], 1
    if option.value is Value.OPTIONAL:
        return [Given(_canonical(option))], 1
    return [Given(_canonical(option), _needed(option, f"--{option.long}", following))], 2


def _cluster(word: str, following: str | None) -> tuple[list[Given], int]:
    """`-N2`, `-N 2`, `-Hvv`, `-HN2`: letters up to the first one that takes a value; the rest is the value."""
    given: list[Given] = []
    letters = word[1:]
    for place, letter in enumerate(letters):
        option = BY_SHORT.get(letter)
        if option is None:
            raise _usage(f"sbatch has no option -{letter} (in {word!r})")
        rest = letters[place + 1 :]
        if option.value is Value.NONE:
            given.append(Given(_canonical(option)))
        elif rest or option.value is Value.OPTIONAL:
            return [*given, Given(_canonical(option), rest or None)], 1
        else:
            return [*given, Given(_canonical(option), _needed(option, f"-{letter}", following))], 2
    return given, 1


def _needed(option: Option, shown: str, following: str | None) -> str:
    if following is None or following == ":":
        raise _usage(f"{shown} needs a value, e.g. --{option.long}=…")
    return following


def _canonical(option: Option) -> str:
    return ALIASES.get(option.long, option.long)


def _find(name: str, with_value: bool) -> Option:
    """By its name or an unambiguous beginning of it, as getopt_long allows.

    Sites add options with plugins (SPANK). Only in the form `--name=value` is it certain where the value ends,
    so that is the form in which they are let through.
    """
    if name in BY_LONG:
        return BY_LONG[name]
    begins = [option for option in OPTIONS if name and option.long.startswith(name)]
    if len({_canonical(option) for option in begins}) == 1:
        return begins[0]
    if begins:
        choices = ", ".join(f"--{option.long}" for option in begins)
        raise _usage(f"--{name} could be any of {choices}; write it out")
    near = difflib.get_close_matches(name, BY_LONG, n=1, cutoff=0.75)
    if with_value and not near and _PLUGIN.fullmatch(name):
        return _plugin(name)
    advice = f"did you mean --{near[0]}?" if near else "write a site plugin's option as --name=value"
    raise _usage(f"sbatch has no option --{name[:64]}; {advice}")


_PLUGIN = re.compile(r"[a-z][a-z0-9_-]{1,63}")


def _plugin(name: str) -> Option:
    return Option(name, "", Value.REQUIRED, Reach.KEPT, sticky=False, variable="")


# ---------------------------------------------------------------------------------------------------------------
# What is in force
# ---------------------------------------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str]) -> Component:
    """The options that sbatch takes from its environment: `SBATCH_ACCOUNT` and so on, and `SLURM_CLUSTERS`."""
    found: list[Given] = []
    for option in OPTIONS:
        value = environ.get(f"SBATCH_{option.variable}") if option.variable else None
        if option.long == "clusters":
            value = value or environ.get("SLURM_CLUSTERS")
        if value is None:
            continue
        if option.value is Value.NONE or (option.long == "requeue" and value.lower() != "expedite"):
            if _FLAG.fullmatch(value):
                found.append(Given(_canonical(option)))
        elif value or option.value is Value.OPTIONAL:
            found.append(Given(_canonical(option), value or None))
    return tuple(found)


_FLAG = re.compile(r"|yes|0*[1-9][0-9]*", re.IGNORECASE)
"""Values that set a flag in sbatch's environment; with any other it is unset (`slurm_process_option`).

`--requeue` is a flag in Slurm 22.05, and takes `expedite` alone in later versions."""

_ALTERNATIVES = (
    frozenset(("mem", "mem-per-cpu", "mem-per-gpu")),
    frozenset(("cpus-per-task", "cpus-per-gpu")),
    frozenset(("core-spec", "thread-spec")),
)
"""Options that sbatch does not take together. One from its environment gives way to one that is given."""


def in_force(
    command: Sequence[Component], header: Sequence[Component], environment: Component = ()
) -> tuple[dict[str, Given], ...]:
    """Per component, the options that hold: command line over environment over script, later over earlier.

    As in sbatch, the last component on the command line also serves further components of the script, and
    options about the job as a whole stay in force for later components. What the environment says gives way where
    the script or the command line says something that rules it out.
    """
    result: list[dict[str, Given]] = []
    sticky: dict[str, Given] = {}
    for index in range(max(len(command), len(header))):
        options = dict(sticky)
        layers: Iterable[Component] = (
            header[index] if index < len(header) else (),
            environment,
            command[min(index, len(command) - 1)],
        )
        for layer in layers:
            for given in layer:
                options[given.canonical if given.option.adds_up else given.name] = given
                _exclusive(options, given.name)
        _give_way(options, environment)
        sticky = {key: given for key, given in options.items() if given.option.sticky}
        result.append(options)
    return tuple(result)


def _exclusive(options: dict[str, Given], name: str) -> None:
    # The later one of such a pair wins in sbatch; both together would be a contradiction in a new submission.
    for pair in (("requeue", "no-requeue"), ("exclusive", "oversubscribe")):
        if name in pair:
            options.pop(pair[1 - pair.index(name)], None)


def _give_way(options: dict[str, Given], environment: Component) -> None:
    for group in _ALTERNATIVES:
        present = {name: options[name] for name in group if name in options}
        if any(given not in environment for given in present.values()):
            for name, given in present.items():
                if given in environment:
                    del options[name]


def canonical(components: Sequence[Iterable[Given]]) -> list[str]:
    """One flat list as sbatch takes it; components are separated by `:`, `--nodes=MIN:MAX` has become MIN."""
    words: list[str] = []
    for index, component in enumerate(components):
        words.extend([":"] if index else [])
        for given in component:
            if given.name == "nodes":
                words.append(f"--nodes={parse_nodes(given.value or '').base}")
            elif given.option.reach is not Reach.OWN:
                words.append(given.canonical)
    return words


def refuse(options: Mapping[str, Given]) -> None:
    """Raises for what cannot be part of a run, with what to do instead."""
    for name in options:
        if name in _REFUSALS:
            raise _usage(f"--{name} cannot be used for a run: {_REFUSALS[name]}")


_REFUSALS = {
    "array": "every array task would be a run of its own. Submit one run per element: for i in …; do "
    "fallow submit … script $i; done",
    "cluster": "one head serves one cluster. Start a head where that cluster's SLURM_CONF is set",
    "clusters": "one head serves one cluster. Start a head where that cluster's SLURM_CONF is set",
    "cluster-constraint": "one head serves one cluster, which federation would undo. Use plain sbatch",
    "external": "such a job starts no script, so nothing would train. Use plain sbatch",
    "uid": "harvest jobs run as yourself. Submit as that user",
    "gid": "harvest jobs run under your own group. Use: sg GROUP -c 'fallow submit …'",
}

# ---------------------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------------------

_RANGE = re.compile(r"^(\d+):(\d+)$")
_COUNT = re.compile(r"^(\d+)([kKmM]?)(?:-(\d+)([kKmM]?))?$")
_SIZES = re.compile(r"^\d+(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)+$|^\d+-\d+:\d+$")
_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}

MAX_NODES = 65_536


def is_range(text: str) -> bool:
    """Return True for Fallow's own `MIN:MAX`. In sbatch's size lists a colon stands before a step."""
    return bool(_RANGE.match(text))


def parse_nodes(text: str, where: str = "--nodes") -> Limits:
    """`MIN:MAX` (Fallow's), or sbatch's own `N`, `MIN-MAX` and size lists, which pass unchanged."""
    if re.search(r"\d{19}", text):
        # Python refuses to read thousands of digits.
        raise _usage(f"{where}={text[:64]}: more than {MAX_NODES} nodes")
    if found := _RANGE.match(text):
        low, high = int(found[1]), int(found[2])
        return _limits(where, text, str(low), low, high)
    if found := _COUNT.match(text):
        low = int(found[1]) * _UNITS[found[2].lower()]
        high = int(found[3]) * _UNITS[found[4].lower()] if found[3] else low
        return _limits(where, text, text, low, high)
    if _SIZES.match(text):
        # A list of sizes, with steps after a colon (Slurm 23.11 and later): the steps are no sizes.
        sizes = [int(number) for number in re.findall(r"\d+", re.sub(r":\d+", "", text))]
        return _limits(where, text, text, max(min(sizes), 1), max(sizes))
    raise _usage(f"{where}={text[:64]}: give MIN:MAX for a run that grows and shrinks, e.g. {where}=1:8")


def _limits(where: str, text: str, base: str, low: int, high: int) -> Limits:
    if low < 1:
        raise _usage(f"{where}={text}: a run needs at least one node, e.g. {where}=1:{max(high, 1)}")
    if low > high:
        text = f"{where}={text}: the minimum is above the maximum; did you mean {where}={high}:{low}?"
        raise _usage(text)
    if high > MAX_NODES:
        raise _usage(f"{where}={text}: more than {MAX_NODES} nodes")
    return Limits(base, low, high)


def run_limits(components: Sequence[Mapping[str, Given]], fallow_nodes: str | None, ranged: bool) -> tuple[int, int]:
    """The run's minimum and maximum over all components.

    A `MIN:MAX` on the command line (`ranged`) goes before the script's `#FALLOW nodes=`, which goes before the
    size of the base job. The base job must lie within what the script allows.
    """
    parts = [_component_limits(options) for options in components]
    low, high = sum(part.minimum for part in parts), sum(part.maximum for part in parts)
    if fallow_nodes is None or ranged:
        return low, high
    limits = parse_nodes(fallow_nodes, "#FALLOW nodes")
    if any("nodes" in options for options in components) and not limits.minimum <= low <= limits.maximum:
        raise _usage(
            f"the base job asks for {low} nodes, outside of #FALLOW nodes={fallow_nodes}; "
            "give --nodes=MIN:MAX to override both"
        )
    return limits.minimum, limits.maximum


def _component_limits(options: Mapping[str, Given]) -> Limits:
    nodes = options.get("nodes")
    if nodes is not None:
        return parse_nodes(nodes.value or "")
    # Without --nodes, Slurm takes as many nodes as the tasks need.
    count = 1
    tasks, per_node = number(options, "ntasks"), number(options, "ntasks-per-node")
    if tasks and per_node:
        count = -(-tasks // per_node)
    return Limits("", count, count)


def base_nodes(spec: RunSpec) -> int:
    """Return how many nodes the base job asks for, which may be more than its run needs (`#FALLOW nodes=`)."""
    components = split(spec.sbatch_options).components
    asked = (_component_limits({given.name: given for given in component}) for component in components)
    return max(spec.min_nodes, sum(limits.minimum for limits in asked))


def number(options: Mapping[str, Given], name: str) -> int | None:
    """Value of an option; None: it was not given, or is no number."""
    given = options.get(name)
    return int(given.value) if given is not None and given.value and given.value.isdecimal() else None


def _usage(text: str) -> FallowError:
    return FallowError(text, Exit.USAGE)
