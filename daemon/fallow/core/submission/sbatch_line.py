"""Splitting an sbatch command line the way sbatch does, and saying what it means for a run."""

import difflib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fallow.core.submission.sbatch_table import BY_LONG, BY_SHORT, OPTIONS, Option, Reach, Value
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

InForce = Mapping[str, Given]
"""The options that hold for one component, by their names."""


class CommandLine(msgspec.Struct, frozen=True):
    components: tuple[Component, ...]
    script: str | None
    args: tuple[str, ...]

    def given(self, name: str) -> list[str]:
        """The values of an option, in whatever component and order; empty for a flag."""
        return [given.value or "" for part in self.components for given in part if given.name == name]


# -- splitting ----------------------------------------------------------------------------------------------------


def split(argv: Sequence[str]) -> CommandLine:
    """`(options, script, args)` as sbatch has them: the first word that is no option is the script.

    `:` separates the components of a heterogeneous job; sbatch drops it wherever it stands, and so do we.
    """
    components: list[list[Given]] = [[]]
    words = deque(argv)
    while words and (words[0] == ":" or (words[0].startswith("-") and words[0] != "-")):
        word = words.popleft()
        if word == "--":
            break
        if word == ":":
            components.append([])
        else:
            components[-1] += [_long(word, words)] if word.startswith("--") else _letters(word, words)
    rest = [word for word in words if word != ":"]
    return CommandLine(tuple(map(tuple, components)), rest[0] if rest else None, tuple(rest[1:]))


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


def _long(word: str, following: deque[str]) -> Given:
    name, equals, value = word[2:].partition("=")
    option = _find(name, bool(equals))
    if equals and option.value is Value.NONE:
        raise _usage(f"--{option.long} takes no value, {word!r} gives one")
    if equals or option.value is not Value.REQUIRED:
        return Given(option.long, value if equals else None)
    return Given(option.long, _next(option, f"--{option.long}", following))


def _letters(word: str, following: deque[str]) -> list[Given]:
    """`-N2`, `-N 2`, `-Hvv`, `-HN2`: letters up to the first one that takes a value; the rest is the value."""
    given: list[Given] = []
    for place, letter in enumerate(word[1:], 2):
        option = BY_SHORT.get(letter)
        if option is None:
            raise _usage(f"sbatch has no option -{letter} (in {word!r})")
        if option.value is not Value.NONE:
            value = word[place:] or None
            if value is None and option.value is Value.REQUIRED:
                value = _next(option, f"-{letter}", following)
            return [*given, Given(option.long, value)]
        given.append(Given(option.long))
    return given


def _next(option: Option, shown: str, following: deque[str]) -> str:
    if not following or following[0] == ":":
        raise _usage(f"{shown} needs a value, e.g. --{option.long}=…")
    return following.popleft()


def _find(name: str, with_value: bool) -> Option:
    """By its name or an unambiguous beginning of it, as getopt_long allows.

    Sites add options with plugins (SPANK). Only in the form `--name=value` is it certain where the value ends,
    so that is the form in which they are let through.
    """
    if name in BY_LONG:
        return BY_LONG[name]
    begins = {long: option for long, option in BY_LONG.items() if name and long.startswith(name)}
    if len({option.long for option in begins.values()}) == 1:
        return next(iter(begins.values()))
    if begins:
        raise _usage(f"--{name} could be any of {', '.join(f'--{long}' for long in sorted(begins))}; write it out")
    near = difflib.get_close_matches(name, BY_LONG, n=1, cutoff=0.75)
    if with_value and not near and _PLUGIN.fullmatch(name):
        return _plugin(name)
    advice = f"did you mean --{near[0]}?" if near else "write a site plugin's option as --name=value"
    raise _usage(f"sbatch has no option --{name[:64]}; {advice}")


_PLUGIN = re.compile(r"[a-z][a-z0-9_-]{1,63}")


def _plugin(name: str) -> Option:
    return Option(name, "", Value.REQUIRED, Reach.KEPT, sticky=False, variable="")


# -- what is in force ---------------------------------------------------------------------------------------------


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
                found.append(Given(option.long))
        elif value or option.value is Value.OPTIONAL:
            found.append(Given(option.long, value or None))
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

_OPPOSITES = {"requeue": "no-requeue", "exclusive": "oversubscribe"}
_OPPOSITES |= {second: first for first, second in _OPPOSITES.items()}
"""The later one of such a pair wins in sbatch; both together would be a contradiction in a new submission."""


def in_force(
    command: Sequence[Component], header: Sequence[Component], environment: Component = ()
) -> tuple[dict[str, Given], ...]:
    """Per component, the options that hold: command line over environment over script, later over earlier.

    As in sbatch, the last component on the command line also serves further components of the script, and
    options about the job as a whole stay in force for later components. Those of the command line hold for earlier
    ones as well, which say nothing else (seen with 22.05 and 25.11). These and what the environment says give way where
    the script or the component's own part of the command line says something that rules them out, and what the
    environment says also where another component does.
    """
    result: list[dict[str, Given]] = []
    options = {given.name: given for part in command for given in part} if len(command) > 1 else {}
    for index in range(max(len(command), len(header))):
        options = {key: given for key, given in options.items() if given.option.sticky}
        own, told = header[index] if index < len(header) else (), command[min(index, len(command) - 1)]
        for given in (*own, *environment, *told):
            options[given.canonical if given.option.adds_up else given.name] = given
            options.pop(_OPPOSITES.get(given.name, ""), None)
        for group in _ALTERNATIVES:
            rivals = group & options.keys()
            weaker = {name for name in rivals if options[name] not in (*own, *told)}
            if weaker == rivals:
                weaker = {name for name in rivals if options[name] in environment}
            if weaker != rivals:
                for name in weaker:
                    del options[name]
        result.append(options)
    return tuple(result)


def canonical(components: Sequence[Iterable[Given]]) -> list[str]:
    """One flat list as sbatch takes it; components are separated by `:`, `--nodes=MIN:MAX` has become MIN."""
    words: list[str] = []
    for index, component in enumerate(components):
        words.extend([":"] if index else [])
        for given in component:
            if given.name == "nodes" and is_range(given.value or ""):
                words.append(f"--nodes={parse_nodes(given.value or '')[0]}")
            elif given.option.reach is not Reach.OWN:
                words.append(given.canonical)
    return words


def refuse(options: InForce) -> None:
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


def text_of(options: InForce, name: str) -> str:
    """Value of an option; empty: it was not given, or has none."""
    return (options[name].value or "") if name in options else ""


def number(options: InForce, name: str) -> int:
    """Value of an option; 0: it was not given, or is no number."""
    text = text_of(options, name)
    return int(text) if text.isdecimal() else 0


# -- nodes --------------------------------------------------------------------------------------------------------

_RANGE = re.compile(r"\d+:\d+")
_SIZE = r"\d+[kKmM]?(?:-\d+[kKmM]?(?::\d+)?)?"
_SIZES = re.compile(rf"{_SIZE}(?:,{_SIZE})*")
"""`4`, `2-8`, `1k`, and lists with steps after a colon (Slurm 23.11 and later): the steps are no sizes."""

MAX_NODES = 65_536


def is_range(text: str) -> bool:
    """Return True for Fallow's own `MIN:MAX`. In sbatch's size lists a colon stands before a step."""
    return bool(_RANGE.fullmatch(text))


def parse_nodes(text: str, where: str = "--nodes") -> tuple[int, int]:
    """Minimum and maximum of `MIN:MAX` (Fallow's), or of sbatch's own `N`, `MIN-MAX` and size lists."""
    shown = f"{where}={text[:64]}"
    if is_range(text):
        parts = [text.split(":")]
    elif _SIZES.fullmatch(text):
        parts = [size.partition(":")[0].split("-") for size in text.split(",")]
    else:
        raise _usage(f"{shown}: give MIN:MAX for a run that grows and shrinks, e.g. {where}=1:8")
    ranges = [(_nodes(part[0]), _nodes(part[-1])) for part in parts]
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    if high > MAX_NODES:
        raise _usage(f"{shown}: more than {MAX_NODES} nodes")
    if low < 1:
        raise _usage(f"{shown}: a run needs at least one node, e.g. {where}=1:{max(high, 1)}")
    if any(first > last for first, last in ranges):
        raise _usage(f"{shown}: the minimum is above the maximum; did you mean {where}={high}:{low}?")
    return low, high


def _nodes(text: str) -> int:
    """`2k`. Python refuses to read thousands of digits."""
    digits = text.rstrip("kKmM")
    return int(digits[:18]) * {"k": 1024, "m": 1024 * 1024}.get(text[len(digits) :].lower(), 1)


def run_limits(components: Sequence[InForce], fallow_nodes: str | None, ranged: bool) -> tuple[int, int]:
    """The run's minimum and maximum over all components.

    A `MIN:MAX` on the command line (`ranged`) goes before the script's `#FALLOW nodes=`, which goes before the
    size of the base job. The base job must lie within what the script allows.
    """
    parts = [component_nodes(options) for options in components]
    low, high = sum(least for least, _ in parts), sum(most for _, most in parts)
    if fallow_nodes is None or ranged:
        return low, high
    least, most = parse_nodes(fallow_nodes, "#FALLOW nodes")
    if any("nodes" in options for options in components) and not least <= low <= most:
        raise _usage(
            f"the base job asks for {low} nodes, outside of #FALLOW nodes={fallow_nodes}; "
            "give --nodes=MIN:MAX to override both"
        )
    return least, most


def component_nodes(options: InForce) -> tuple[int, int]:
    """Minimum and maximum of one component. Without --nodes, Slurm takes as many nodes as the tasks need."""
    if "nodes" in options:
        return parse_nodes(text_of(options, "nodes"))
    tasks, per_node = number(options, "ntasks"), number(options, "ntasks-per-node")
    count = -(-tasks // per_node) if tasks and per_node else 1
    return count, count


def base_nodes(spec: RunSpec) -> int:
    """Return how many nodes the base job asks for, which may be more than its run needs (`#FALLOW nodes=`)."""
    components = split(spec.sbatch_options).components
    asked = (component_nodes({given.name: given for given in component})[0] for component in components)
    return max(spec.min_nodes, sum(asked))


def _usage(text: str) -> FallowError:
    return FallowError(text, Exit.USAGE)
