"""Split an sbatch command line as sbatch does, and say what it means for a run."""

import difflib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fallow.core.submission.sbatch_table import BY_LONG, BY_SHORT, FALLOW_KEYS, OPTIONS, Option, Reach, Value
from fallow.model import Exit, FallowError, RunSpec


class OptionUse(msgspec.Struct, frozen=True):
    """One use of an option. `value` is None for a flag, or if an optional value was omitted."""

    name: str
    value: str | None = None

    @property
    def canonical(self) -> str:
        """`--long` or `--long=value`: one word, whatever the value is."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"

    @property
    def option(self) -> Option:
        """The option's row in the table. An option without a row is a site plugin's (see `_find`)."""
        return BY_LONG.get(self.name) or _plugin(self.name)


Component = tuple[OptionUse, ...]
"""The options of one job, or of one component of a heterogeneous job."""

InForce = Mapping[str, OptionUse]
"""The options that hold for one component, by name."""


class CommandLine(msgspec.Struct, frozen=True):
    components: tuple[Component, ...]
    script: str | None
    args: tuple[str, ...]

    def values_of(self, name: str) -> list[str]:
        """Values of an option in all components, in order; "" for a flag."""
        return [use.value or "" for part in self.components for use in part if use.name == name]


# -- splitting ----------------------------------------------------------------------------------------------------


def split(argv: Sequence[str]) -> CommandLine:
    """`(options, script, args)` as sbatch splits them: the first word that is no option is the script.

    `:` separates the components of a heterogeneous job. sbatch ignores any further `:`, and so do we.
    """
    components: list[list[OptionUse]] = [[]]
    words = deque(argv)
    while words and (words[0] == ":" or (words[0].startswith("-") and words[0] != "-")):
        word = words.popleft()
        if word == "--":
            break
        if word == ":":
            components.append([])
        else:
            components[-1] += [_long(word, words)] if word.startswith("--") else _letters(word, words)
    arguments = [word for word in words if word != ":"]
    return CommandLine(tuple(map(tuple, components)), arguments[0] if arguments else None, tuple(arguments[1:]))


def parse_options(words: Sequence[str], where: str) -> Component:
    """Read options only, e.g. of a `#SBATCH` line. Any other word is an error, as in sbatch."""
    try:
        line = split(words)
    except FallowError as error:
        raise FallowError(f"{where}: {error.message}", error.code) from error
    if line.script is not None:
        raise FallowError(f"{where}: {line.script!r} is not an sbatch option", Exit.DATA)
    for use in line.components[0]:
        if use.option.reach is Reach.OWN:
            raise FallowError(f"{where}: sbatch does not know --{use.name}; write a #FALLOW line", Exit.DATA)
        if use.name == "nodes" and is_range(use.value or ""):
            text = f"{where}: sbatch does not know --nodes={use.value}; write `#FALLOW nodes={use.value}`"
            raise FallowError(text, Exit.DATA)
    return line.components[0]


def _long(word: str, following: deque[str]) -> OptionUse:
    name, equals, value = word[2:].partition("=")
    option = _find(name, value if equals else None)
    if equals and option.value is Value.NONE:
        raise _usage(f"--{option.long} takes no value, {word!r} gives one")
    if equals or option.value is not Value.REQUIRED:
        return OptionUse(option.long, value if equals else None)
    return OptionUse(option.long, _next(option, f"--{option.long}", following))


def _letters(word: str, following: deque[str]) -> list[OptionUse]:
    """`-N2`, `-N 2`, `-Hvv`, `-HN2`: letters up to the first one that takes a value; the rest is the value."""
    uses: list[OptionUse] = []
    for place, letter in enumerate(word[1:], 2):
        option = BY_SHORT.get(letter)
        if option is None:
            raise _usage(f"sbatch has no option -{letter} (in {word!r})")
        if option.value is not Value.NONE:
            value = word[place:] or None
            if value is None and option.value is Value.REQUIRED:
                value = _next(option, f"-{letter}", following)
            return [*uses, OptionUse(option.long, value)]
        uses.append(OptionUse(option.long))
    return uses


def _next(option: Option, spelling: str, following: deque[str]) -> str:
    if not following or following[0] == ":":
        raise _usage(f"{spelling} needs a value, e.g. --{option.long}=…")
    return following.popleft()


def _find(name: str, value: str | None) -> Option:
    """Find an option by its name or an unambiguous prefix, as getopt_long does.

    Site plugins (SPANK) add options. Only in the form `--name=value` is it certain where the value ends, so only this
    form of an unknown option is accepted.
    """
    if name in BY_LONG:
        return BY_LONG[name]
    begins = {long: option for long, option in BY_LONG.items() if name and long.startswith(name)}
    if len({option.long for option in begins.values()}) == 1:
        return next(iter(begins.values()))
    if begins:
        raise _usage(f"--{name} could be any of {', '.join(f'--{long}' for long in sorted(begins))}; write it out")
    near = difflib.get_close_matches(name, BY_LONG, n=1, cutoff=0.75)
    if value is not None and not near and name not in FALLOW_KEYS and _PLUGIN.fullmatch(name):
        return _plugin(name)
    near = difflib.get_close_matches(name, (*BY_LONG, *FALLOW_KEYS), n=1, cutoff=0.75)
    advice = f"did you mean --{near[0]}?" if near else "write a site plugin's option as --name=value"
    if near and near[0] in FALLOW_KEYS.keys() - BY_LONG.keys():
        form = FALLOW_KEYS[near[0]]
        setting = f"{near[0]}={form if value is None else value[:64]}" if form else near[0]
        advice = f"write --fallow={setting}, or a line `#FALLOW {setting}` in the script"
    raise _usage(f"sbatch has no option --{name[:64]}; {advice}")


_PLUGIN = re.compile(r"[a-z][a-z0-9_-]{1,63}")


def _plugin(name: str) -> Option:
    return Option(name, "", Value.REQUIRED, Reach.KEPT, sticky=False, variable="")


# -- options in force ---------------------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str]) -> Component:
    """The options that sbatch takes from its environment: `SBATCH_ACCOUNT` and so on, and `SLURM_CLUSTERS`."""
    uses: list[OptionUse] = []
    for option in OPTIONS:
        value = environ.get(f"SBATCH_{option.variable}") if option.variable else None
        if option.long == "clusters":
            value = value or environ.get("SLURM_CLUSTERS")
        if value is None:
            continue
        if option.value is Value.NONE or (option.long == "requeue" and value.lower() != "expedite"):
            if _FLAG.fullmatch(value):
                uses.append(OptionUse(option.long))
        elif value or option.value is Value.OPTIONAL:
            uses.append(OptionUse(option.long, value or None))
    return tuple(uses)


_FLAG = re.compile(r"|yes|0*[1-9][0-9]*", re.IGNORECASE)
"""Values that set a flag in sbatch's environment; any other value unsets it (`slurm_process_option`).

`--requeue` is a flag in Slurm 22.05; later versions accept only `expedite`.
"""

_ALTERNATIVES = (
    frozenset(("mem", "mem-per-cpu", "mem-per-gpu")),
    frozenset(("cpus-per-task", "cpus-per-gpu")),
    frozenset(("core-spec", "thread-spec")),
)
"""Options that sbatch does not accept together. An option of the environment gives way to an option that is given."""

_OPPOSITES = {"requeue": "no-requeue", "exclusive": "oversubscribe"}
_OPPOSITES |= {second: first for first, second in _OPPOSITES.items()}
"""Pairs of which sbatch takes the later one. A new submission must not contain both."""


def in_force(
    command: Sequence[Component], header: Sequence[Component], environment: Component = ()
) -> tuple[dict[str, OptionUse], ...]:
    """Options that hold for each component: command line over environment over script, later over earlier.

    Rules of sbatch (seen with 22.05 and 25.11):
    - The last component of the command line also serves further components of the script.
    - Options about the job as a whole (`Option.sticky`) stay in force for later components. From the command line they
      also hold for earlier components that do not give them.
    - The latter, and options of the environment, give way if the script or the component's own part of the command line
      excludes them. Options of the environment also give way if another component excludes them.
    """
    result: list[dict[str, OptionUse]] = []
    options = {use.name: use for part in command for use in part} if len(command) > 1 else {}
    for index in range(max(len(command), len(header))):
        options = {key: use for key, use in options.items() if use.option.sticky}
        script_uses, command_uses = header[index] if index < len(header) else (), command[min(index, len(command) - 1)]
        for use in (*script_uses, *environment, *command_uses):
            options[use.canonical if use.option.adds_up else use.name] = use
            options.pop(_OPPOSITES.get(use.name, ""), None)
        for group in _ALTERNATIVES:
            rivals = group & options.keys()
            weaker = {name for name in rivals if options[name] not in (*script_uses, *command_uses)}
            if weaker == rivals:
                weaker = {name for name in rivals if options[name] in environment}
            if weaker != rivals:
                for name in weaker:
                    del options[name]
        result.append(options)
    return tuple(result)


def canonical(components: Sequence[Iterable[OptionUse]]) -> list[str]:
    """One flat list for sbatch: `:` separates components, and `--nodes=MIN:MAX` becomes MIN."""
    words: list[str] = []
    for index, component in enumerate(components):
        words.extend([":"] if index else [])
        for use in component:
            if use.name == "nodes" and is_range(use.value or ""):
                words.append(f"--nodes={parse_nodes(use.value or '')[0]}")
            elif use.option.reach is not Reach.OWN:
                words.append(use.canonical)
    return words


def refuse(options: InForce) -> None:
    """Raise FallowError for an option that cannot be part of a run, and name the alternative."""
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
    """Value of an option; empty: not given, or without a value."""
    return (options[name].value or "") if name in options else ""


def number(options: InForce, name: str) -> int:
    """Value of an option; 0: not given, or no number."""
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
    setting = f"{where}={text[:64]}"
    if is_range(text):
        parts = [text.split(":")]
    elif _SIZES.fullmatch(text):
        parts = [size.partition(":")[0].split("-") for size in text.split(",")]
    else:
        raise _usage(f"{setting}: give MIN:MAX for a run that grows and shrinks, e.g. {where}=1:8")
    ranges = [(_nodes(part[0]), _nodes(part[-1])) for part in parts]
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    if high > MAX_NODES:
        raise _usage(f"{setting}: more than {MAX_NODES} nodes")
    if low < 1:
        raise _usage(f"{setting}: a run needs at least one node, e.g. {where}=1:{max(high, 1)}")
    if any(first > last for first, last in ranges):
        raise _usage(f"{setting}: the minimum is above the maximum; did you mean {where}={high}:{low}?")
    return low, high


def _nodes(text: str) -> int:
    """`2k` as a number. Python refuses to read thousands of digits."""
    digits = text.rstrip("kKmM")
    return int(digits[:18]) * {"k": 1024, "m": 1024 * 1024}.get(text[len(digits) :].lower(), 1)


def run_limits(components: Sequence[InForce], fallow_nodes: str | None, ranged: bool) -> tuple[int, int]:
    """Minimum and maximum nodes of the run, over all components.

    A `MIN:MAX` on the command line (`ranged`) overrides the script's `#FALLOW nodes=`, which overrides the size of the
    base job. The size of the base job must lie within `#FALLOW nodes=`.
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
    """Minimum and maximum nodes of one component. Without --nodes, Slurm takes as many nodes as the tasks need."""
    if "nodes" in options:
        return parse_nodes(text_of(options, "nodes"))
    tasks, per_node = number(options, "ntasks"), number(options, "ntasks-per-node")
    count = -(-tasks // per_node) if tasks and per_node else 1
    return count, count


def base_nodes(spec: RunSpec) -> int:
    """Number of nodes that the base job requests, which may be more than its run needs (`#FALLOW nodes=`)."""
    components = split(spec.sbatch_options).components
    minima = (component_nodes({use.name: use for use in component})[0] for component in components)
    return max(spec.min_nodes, sum(minima))


def _usage(text: str) -> FallowError:
    return FallowError(text, Exit.USAGE)
