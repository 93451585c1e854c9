"""The configuration: /etc/fallow/config.toml, then the user's file, then variables `FALLOW_<SECTION>__<KEY>`.

A later source overrides an earlier one. The user's file is `$FALLOW_CONFIG`, else
`$XDG_CONFIG_HOME/fallow/config.toml`.
Unknown sections and keys are refused by name, because a misspelt key would do nothing without a word.

`make reference` makes docs/settings.md from the texts below the fields. "None: X" and "empty: X" say what that default
means.
"""

import difflib
import ipaddress
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fallow.core.checks.network import port_range
from fallow.files import base_folder
from fallow.model import ACCOUNT_PATTERN, DataNetwork, Exit, FallowError

SYSTEM_FILE = Path("/etc/fallow/config.toml")

Seconds = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=ACCOUNT_PATTERN)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Slurm(_Section, frozen=True):
    """How and how often the head asks Slurm."""

    poll_interval_s: Seconds = 30.0
    "Seconds between two polls. At most 5 while nodes are held that only Fallow would give back."
    queries_per_min: Annotated[float, Meta(ge=1)] = 120.0
    "Limit of requests to slurmctld. A poll makes about six. Lower it where slurmctld is slow."
    submits_per_min: Annotated[float, Meta(ge=1)] = 120.0
    "Limit of submissions. The default is as fast as Slurm's own limiter (rl_refill_rate=2) lets a user go on."
    client: Literal["auto", "cli", "pyslurm", "none"] = "auto"
    "`auto`: pyslurm if it fits the cluster's Slurm, else `cli`, Slurm's commands. `none`: no Slurm."


class Harvest(_Section, frozen=True):
    """Which idle nodes the head asks for."""

    partitions: list[str] = msgspec.field(default_factory=list)
    "Where nodes are asked for. empty: every partition that is up and where others' jobs preempt ours"
    max_pending: Annotated[int, Meta(ge=1)] | None = None
    "Requests that may wait at once. None: as many as can be submitted before a poll shows that one started"
    max_nodes: Annotated[int, Meta(ge=0)] | None = None
    "Nodes over all runs. Base jobs do not count; nodes of normal priority for a deadline do. None: no limit"
    partition_nodes: dict[str, Annotated[int, Meta(ge=0)]] = msgspec.field(default_factory=dict)
    "Nodes in single partitions, for example `{gpu = 4}`. empty: no limit"
    max_minutes: Annotated[int, Meta(ge=1)] = 120
    "Longest time limit of a harvest job. Lower it if others wait too long for nodes without preemption."
    min_minutes: Annotated[int, Meta(ge=1)] = 2
    "Shorter holes are not asked for. Raise it if your script takes long to start."
    nice: Annotated[int, Meta(ge=0, le=2147483645)] = 100_000
    "`--nice` of harvest jobs. Fallow takes more where the site's priority weights need it."
    qos: Name | None = None
    "QOS of harvest jobs. Under `preempt/qos` it must be one that others preempt. None: the base job's"
    account: Name | None = None
    "Account of harvest jobs. Runs still count for their own project. None: the base job's"
    allow_without_preemption: bool = False
    "Also use nodes that Slurm would not take back. Fallow gives them back itself within seconds."
    limit_reserve: Annotated[float, Meta(ge=0, le=1)] = 0.25
    "Part of each limit of your account and QOS that harvest jobs leave free for your other jobs."


class Site(_Section, frozen=True):
    """What the administrators allow. This section counts in /etc/fallow/config.toml only.

    A maximum cuts every user's setting of the same name under `[harvest]` or `[slurm]`.
    """

    harvest_unseen: bool = False
    "Allow harvesting though others' jobs cannot be seen (`PrivateData=jobs`)."
    harvest_unfair: bool = False
    "Allow harvesting though our requests may come before others' jobs."
    max_nodes: Annotated[int, Meta(ge=0)] | None = None
    "Maximum of `[harvest] max_nodes`. None: no limit"
    partition_nodes: dict[str, Annotated[int, Meta(ge=0)]] = msgspec.field(default_factory=dict)
    "Maximum of `[harvest] partition_nodes`. empty: no limit"
    max_pending: Annotated[int, Meta(ge=1)] | None = None
    "Maximum of `[harvest] max_pending`. None: no limit"
    max_minutes: Annotated[int, Meta(ge=1)] | None = None
    "Maximum of `[harvest] max_minutes`. None: no limit"
    queries_per_min: Annotated[float, Meta(ge=1)] | None = None
    "Maximum of `[slurm] queries_per_min`. None: no limit"
    submits_per_min: Annotated[float, Meta(ge=1)] | None = None
    "Maximum of `[slurm] submits_per_min`. None: no limit"
    stop_file: Annotated[str, Meta(pattern="^/")] | None = None
    "While this file exists, nobody harvests. None: there is no such switch"


class HeadSection(_Section, frozen=True):
    """Where the head listens and keeps its state."""

    address: str | None = None
    "IP address to listen on. None: the one that leads to slurmctld"
    port: Port | None = None
    "Port to listen on. None: a free one"
    redis_url: str | None = None
    "A site's Redis, for example `rediss://...`. None: a private server on a Unix socket"
    prometheus_port: Port | None = None
    "Port of metrics on 127.0.0.1. None: no metrics"


class Network(_Section, frozen=True):
    """Where head and members listen.

    The job's own variables come first: `GLOO_SOCKET_IFNAME` (exact names), then `NCCL_SOCKET_IFNAME`. A node without
    such an interface is refused with the names of those it has.
    """

    interface: str | None = None
    "Interface of members' traffic, as in `NCCL_SOCKET_IFNAME`: `ib0`, `=eth1`. None: the one that leads to the head"
    subnet: str | None = None
    "Use this where interfaces have different names: `10.78.0.0/24`. None: any"
    head_ports: str | None = None
    "The head listens on a free port of these unless `[head] port` names one: `19000-19009`. None: any free port"
    member_ports: str | None = None
    "Members listen on these ports alone: `20000-20100`. Give 16 per worker of a node, at least 64. None: any free port"

    @property
    def data(self) -> DataNetwork:
        """The part that the head sends to agents and workers."""
        return DataNetwork(
            interface=self.interface or "", subnet=self.subnet or "", member_ports=self.member_ports or ""
        )


class Membership(_Section, frozen=True):
    """Deadlines of members."""

    beat_s: Seconds = 0.5
    "Seconds between two heartbeats of a node. Raise it to 2 if one head has thousands of nodes."
    lease_s: Seconds = 15.0
    "A silent member is ejected after this while others wait for it. At least three heartbeats."
    prepare_timeout_s: Seconds = 30.0
    "Time to build a process group."
    start_timeout_s: Seconds = 600.0
    "Time from a worker's start until it is ready. Raise it if imports or compilation take longer."
    progress_s: Seconds = 300.0
    "A member that keeps the others waiting for longer is ejected. Raise it if an evaluation or a save takes longer."
    head_patience_s: Seconds = 600.0
    "A base job that has heard no head for this long starts a stand-in head."
    bar_after: Annotated[int, Meta(ge=1)] = 3
    "Failures (exception, crash, hang) on one node within an hour after which a run does without the node."
    release_margin_s: Annotated[float, Meta(ge=0)] = 20.0
    "Added to the measured time that a release takes. Raise it if your nodes are slow to leave."


class Checkpoint(_Section, frozen=True):
    """Durable checkpoints."""

    interval_s: Annotated[float, Meta(ge=0)] = 600.0
    "Seconds between two checkpoints: the most that is lost when all nodes go at once. 0: no periodic ones."
    keep: Annotated[int, Meta(ge=1)] = 2
    "Checkpoints that each run keeps, besides those of `fallow checkpoint`."
    path: Annotated[str, Meta(pattern="^/")] | None = None
    "Folder for checkpoints, shared by all nodes. Each new run gets a private folder in it. None: the state folder"


class Prune(_Section, frozen=True):
    """When the files of ended runs go by themselves. `fallow prune` has the same defaults. Checkpoints always stay."""

    keep: Annotated[int, Meta(ge=0)] = 20
    "The newest ended runs keep their files, however old they are."
    older_than_days: Annotated[float, Meta(ge=0)] = 30.0
    "Runs that ended later than this keep their files."


class Usage(_Section, frozen=True):
    """Prices, for `fallow usage`."""

    node_hour: dict[str, Price] = msgspec.field(default_factory=dict)
    'Price of a node for an hour, by partition. `"*"` is every other partition: `{"*" = 0.5}`. empty: no prices'
    gpu_hour: dict[str, Price] = msgspec.field(default_factory=dict)
    "The same for a GPU. Both prices are added. empty: no prices"
    currency: str = ""
    "Shown with the prices, for example `EUR`. empty: none"


class Config(_Section, frozen=True):
    harvest: Harvest = Harvest()
    slurm: Slurm = Slurm()
    checkpoint: Checkpoint = Checkpoint()
    network: Network = Network()
    head: HeadSection = HeadSection()
    membership: Membership = Membership()
    usage: Usage = Usage()
    prune: Prune = Prune()
    site: Site = Site()
    cut: tuple[str, ...] = ()
    "one text for each setting of the user that a maximum of `[site]` has cut"


SECTIONS: dict[str, type[_Section]] = {
    field.name: field.type for field in msgspec.structs.fields(Config) if field.name != "cut"
}


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's configuration file. The file need not exist."""
    if named := environ.get("FALLOW_CONFIG"):
        return Path(named)
    return config_home(environ) / "fallow" / "config.toml"


def config_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which all programs keep the user's settings (XDG Base Directory Specification)."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return base_folder(environ, "XDG_CONFIG_HOME") or home / ".config"


def load_config(environ: Mapping[str, str] = os.environ, system_file: Path = SYSTEM_FILE) -> Config:
    """Read, check and merge all sources.

    Args:
        environ: environment variables of the process.
        system_file: the administrators' file. Only this file may have a section `[site]`.

    Returns:
        The configuration. Values above the maxima of `[site]` are cut, and `Config.cut` says which.

    Raises:
        FallowError: a source cannot be read, or has an unknown key or a wrong value (code CONFIG).
    """
    return load_with_origins(environ, system_file)[0]


def load_with_origins(environ: Mapping[str, str], system_file: Path) -> tuple[Config, dict[str, dict[str, str]]]:
    """Do what `load_config` does. Return also section -> key -> where the value comes from.

    An origin is `default`, the path of a file or the name of a variable, and says whether `[site]` has cut the value.
    """
    merged: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origins = {name: dict.fromkeys(struct.__struct_fields__, "default") for name, struct in SECTIONS.items()}
    for origin, sections in _sources(environ, system_file):
        for section, values in sections.items():
            if section == "site" and origin != str(system_file):
                raise FallowError(
                    f"{origin}: [site] is the administrators'; it counts in {system_file} only", Exit.CONFIG
                )
            merged[section] |= values
            origins[section] |= dict.fromkeys(values, origin)
    # Each source was checked by itself, so only rules over several keys are left to check.
    uncut = msgspec.convert(merged, Config)
    config = _within_maxima(uncut, merged, system_file)
    if config.membership.lease_s < 3 * config.membership.beat_s:
        raise FallowError(
            f"[membership] lease_s={config.membership.lease_s:g} is less than three beats "
            f"(beat_s={config.membership.beat_s:g}); healthy workers would be ejected",
            Exit.CONFIG,
        )
    for section in _MAXIMA:
        before, after = getattr(uncut, section), getattr(config, section)
        for key in origins[section]:
            if getattr(before, key) != getattr(after, key):
                origins[section][key] += f", cut by [site] {key}"
    return config, origins


_MAXIMA = {
    "harvest": ("max_nodes", "max_pending", "max_minutes"),
    "slurm": ("queries_per_min", "submits_per_min"),
}
"""Section -> keys that `[site]` may limit by a key of the same name."""


def _within_maxima(config: Config, explicit_values: Mapping[str, Mapping[str, Any]], system_file: Path) -> Config:
    """Cut values to the site's maxima. Args: explicit_values: section -> key -> value, as the sources have them."""
    cut: list[str] = []

    def least(section: str, key: str, value: float | None, most: float | None, explicit: bool) -> float | None:
        if most is None or (value is not None and value <= most):
            return value
        if explicit and value is not None:
            cut.append(f"[{section}] {key} = {value:g} is cut to {most:g}, by [site] {key} in {system_file}")
        return most

    site, changed = config.site, {}
    for section, keys in _MAXIMA.items():
        own, explicit_keys = getattr(config, section), explicit_values[section]
        values = {key: least(section, key, getattr(own, key), getattr(site, key), key in explicit_keys) for key in keys}
        changed[section] = msgspec.structs.replace(own, **values)
    harvest = config.harvest
    nodes = {
        name: least("harvest", f"partition_nodes.{name}", harvest.partition_nodes.get(name), most, True)
        for name, most in site.partition_nodes.items()
    }
    changed["harvest"] = msgspec.structs.replace(changed["harvest"], partition_nodes=harvest.partition_nodes | nodes)
    return msgspec.structs.replace(config, **changed, cut=tuple(cut))


def _read(path: Path, must_exist: bool) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise FallowError(f"{path}: no such file (FALLOW_CONFIG names it)", Exit.CONFIG) from None
        return {}
    except OSError as error:
        raise FallowError(f"{path}: cannot be read ({error.strerror})", Exit.CONFIG) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FallowError(f"{path}: not valid TOML ({error})", Exit.CONFIG) from error
    for section, values in data.items():
        if section not in SECTIONS:
            raise _unknown(str(path), f"[{section}]", section, SECTIONS)
        if not isinstance(values, dict):
            raise FallowError(f"{path}: {section} must be a section, written [{section}]", Exit.CONFIG)
        _check(str(path), section, values, strict=True)
    return data


def _sources(environ: Mapping[str, str], system_file: Path) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield the name and the sections of each source. A later source overrides an earlier one."""
    yield str(system_file), _read(system_file, must_exist=False)
    path = user_file(environ)
    yield str(path), _read(path, must_exist=bool(environ.get("FALLOW_CONFIG")))
    for variable, text in environ.items():
        if variable.startswith("FALLOW_") and "__" in variable:
            yield variable, _from_variable(variable, text)


def _from_variable(variable: str, text: str) -> dict[str, dict[str, Any]]:
    """Read a variable such as `FALLOW_HARVEST__NICE=0`. Lists have commas, tables `NAME=NUMBER`; empty means none."""
    section, _, key = variable.removeprefix("FALLOW_").lower().partition("__")
    if section not in SECTIONS:
        raise _unknown(variable, f"section {section}", section, SECTIONS)
    value: Any = text
    if section == "harvest" and key == "partitions":
        value = [name.strip() for name in text.split(",") if name.strip()]
    elif (section, key) in (("harvest", "partition_nodes"), ("usage", "node_hour"), ("usage", "gpu_hour")):
        pairs = (item.partition("=") for item in text.split(",") if item.strip())
        value = {name.strip(): number.strip() for name, _, number in pairs}
    elif not text:
        value = None
    return {section: _check(variable, section, {key: value}, strict=False)}


def _check(origin: str, section: str, values: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Check the values of one section, and return them with the fields' types. Not `strict`: texts are converted."""
    known_keys = SECTIONS[section].__struct_fields__
    for key in values:
        if key not in known_keys:
            raise _unknown(origin, f"[{section}] {key}", key, known_keys)
    try:
        checked = msgspec.convert(values, SECTIONS[section], strict=strict)
    except msgspec.ValidationError as error:
        text = (
            str(error)
            .replace(" - at `$.", " at `")
            .replace("`$.", "`")
            .replace("matching regex '^/'", "that begins with /")
        )
        raise FallowError(f"{origin}: [{section}] {_lower(text)}", Exit.CONFIG) from error
    for key in values:
        value = getattr(checked, key)
        numbers = value.values() if isinstance(value, dict) else (value,)
        if math.inf in numbers:
            raise FallowError(f"{origin}: [{section}] {key} must be finite", Exit.CONFIG)
    if isinstance(checked, Network):
        _check_network(origin, checked)
    return {key: getattr(checked, key) for key in values}


def _check_network(origin: str, network: Network) -> None:
    for key in ("head_ports", "member_ports"):
        if (text := getattr(network, key)) is not None:
            try:
                port_range(text)
            except ValueError as error:
                raise FallowError(f"{origin}: [network] {key}: {error}", Exit.CONFIG) from None
    if network.subnet is not None:
        try:
            ipaddress.ip_network(network.subnet, strict=False)
        except ValueError as error:
            text = f"{origin}: [network] subnet: {error}; write it as 10.78.0.0/24"
            raise FallowError(text, Exit.CONFIG) from None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _unknown(origin: str, label: str, name: str, known_names: Any) -> FallowError:
    near = difflib.get_close_matches(name, list(known_names), n=1)
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known_names)}"
    return FallowError(f"{origin}: {label} is not known; {advice}", Exit.CONFIG)
