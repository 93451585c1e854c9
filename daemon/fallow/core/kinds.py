"""Kinds of nodes: which ones a run or a job can use, and which partitions and reservations an owner may. Pure."""

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from fallow.core.holes import Part
from fallow.model import ClusterState, NodeInfo, PartitionInfo

Likeness = tuple[str, int, tuple[tuple[str, int], ...], tuple[str, ...]]
"""Architecture, CPUs, GPUs by type, features: nodes that share it compute the same bits, as far as Slurm can tell."""


class Kind(msgspec.Struct, frozen=True, cache_hash=True):
    """What a node must be to be of use to a run. The default: any node. Plans ask for its hash a million times."""

    arch: str = ""
    "empty: any, because nothing of the run has started yet"
    gpus: int = 0
    "at least so many on a node"
    part_gpus: int = 0
    "at least so many idle ones where nodes are shared; 0: whole nodes only"
    gpu_type: str = ""
    "empty: any"
    constraint: str = ""
    "on features, as sbatch takes it; empty: none"
    cpus: int = 0
    "that the script asks for on a node; 0: it does not say; so with memory"
    memory_mb: int = 0
    reservation: str = ""
    "that the run names, or several with commas; empty: none"
    alike: tuple[Likeness, ...] = ()
    "of a reproducible run: nodes like its members', each likeness once and in order; empty: any"

    def suits(self, node: NodeInfo, part: Part | None = None) -> bool:
        """Can the run use this node, or this part of it?"""
        types = node.gpu_types if part is None else {part.gpu_type: part.gpus}
        there = types.get(self.gpu_type, 0) if self.gpu_type else node.gpus if part is None else part.gpus
        return (
            (not self.arch or not node.arch or node.arch == self.arch)
            and (there >= self.gpus if part is None else 0 < self.part_gpus <= there)
            and (not self.gpu_type or self.gpu_type in types)
            and (not self.constraint or suits(node.features, self.constraint))
            and (not self.alike or likeness(node) in self.alike)
            and node.reservation in self.reservation.split(",")
        )

    def share(self, part: Part) -> Part:
        """What the run asks for of an idle part: no more GPUs, CPUs and memory than its script asks for on a node."""
        gpus = min(self.gpus or part.gpus, part.gpus)
        cpus = max(1, part.cpus * gpus // part.gpus)
        memory_mb = part.memory_mb * gpus // part.gpus
        return replace(
            part,
            gpus=gpus,
            cpus=min(cpus, self.cpus or cpus),
            memory_mb=min(memory_mb, self.memory_mb or memory_mb),
        )


def likeness(node: NodeInfo) -> Likeness:
    return node.arch, node.cpus, tuple(sorted(node.gpu_types.items())), tuple(sorted(node.features))


def open_to(partition: PartitionInfo, groups: Collection[str] | None) -> bool:
    """May a member of these groups submit there (AllowGroups)? None: it is not known of which somebody is one."""
    return groups is None or not partition.allow_groups or any(group in groups for group in partition.allow_groups)


def may_use(partition: PartitionInfo, account: str, qos: str) -> bool:
    """May jobs of this account and QOS run there, as far as is known? Empty ones are defaults that nobody tells."""
    return (
        not partition.root_only
        and not partition.requires_reservation
        and (not account or not partition.allow_accounts or account in partition.allow_accounts)
        and account not in partition.deny_accounts
        and (not qos or not partition.allow_qos or qos in partition.allow_qos)
        and qos not in partition.deny_qos
    )


# -- constraints on nodes' features ---------------------------------------------------------------------------------

Wanted = Callable[[frozenset[str]], bool]
"""Returns True if a node with these features will do."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TOKEN = re.compile(r"[^\s&|(),\[\]*]+|[&|(),]")
_COUNT = re.compile(r"\*\d+")


@lru_cache(maxsize=256)
def alternatives(text: str) -> tuple[Wanted, ...]:
    """Return the alternatives of a constraint in sbatch's words: all nodes of a job must meet the same one.

    Words are as `a100&ib`, `[rack1|rack2]`, `(a|b)&c`, `a*2&b*1` (sbatch(1), --constraint). Counts are not checked: a
    node with one of the counted features will do.

    There is one alternative, unless the constraint has square brackets. Words that cannot be read ask for nothing.
    """
    found = _BRACKETS.search(text)
    if found is None:
        return (_wanted(text),)
    # [a*2&b*4] gives so many nodes of each: any of them has one of the two.
    options = [found[1]] if _COUNT.search(found[1]) else found[1].split("|")
    rest = (f"{text[: found.start()]}({option}){text[found.end() :]}" for option in options)
    return tuple(wanted for each in rest for wanted in alternatives(each))


def suits(features: Iterable[str], constraint: str) -> bool:
    """Return True if a node with these features will do for a job of one node."""
    return any(wanted(frozenset(features)) for wanted in alternatives(constraint))


def _wanted(text: str) -> Wanted:
    if _COUNT.search(text):
        text = _COUNT.sub("", text).replace("&", "|")
    tokens = _TOKEN.findall(text)
    try:
        wanted = _parse(tokens)
    except ValueError:
        return lambda _: True
    return (lambda _: True) if tokens else wanted


def _parse(tokens: list[str], level: int = 0) -> Wanted:
    """Take what is joined by `|` (level 0), what is joined by `&` or `,` (1), or a name or bracket (2) off the front.

    Raises:
        ValueError: it cannot be read.
    """
    if level < 2:
        parts = [_parse(tokens, level + 1)]
        while tokens and tokens[0] in ("|", "&,")[level]:
            del tokens[0]
            parts.append(_parse(tokens, level + 1))
        combine = (any, all)[level]
        return lambda has: combine(part(has) for part in parts)
    if not tokens or tokens[0] in "&|,)":
        raise ValueError
    name = tokens.pop(0)
    if name != "(":
        return lambda has: name in has
    wanted = _parse(tokens)
    if tokens[:1] != [")"]:
        raise ValueError
    del tokens[0]
    return wanted


_RESERVED = frozenset(("RES", "RESERVED"))


def within(cluster: ClusterState, names: Collection[str]) -> ClusterState:
    """Return the poll as runs see it that name these reservations.

    Nodes of such a reservation are open for as long as the reservation lasts, to those runs alone (`Kind.suits`).

    Args:
        cluster: one poll.
        names: of reservations, separated by commas where a run names several.
    """
    named = {name for some in names for name in some.split(",")} - {""}
    own = [r for r in cluster.reservations if r.reservation in named and r.start_at <= cluster.at < r.end_at]
    if not own:
        return cluster
    inside = {node: reservation.reservation for reservation in own for node in reservation.nodes}
    return replace(
        cluster,
        nodes=[
            replace(node, reservation=inside[node.node], flags=[flag for flag in node.flags if flag not in _RESERVED])
            if node.node in inside
            else node
            for node in cluster.nodes
        ],
        reservations=[replace(r, own=True) if r in own else r for r in cluster.reservations],
    )
