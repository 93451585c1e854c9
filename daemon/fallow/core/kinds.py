"""Kinds of nodes: which nodes a run or job can use, and which partitions and reservations its owner may use. Pure."""

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from fallow.core.holes import Part
from fallow.model import ClusterState, NodeInfo, PartitionInfo

Likeness = tuple[str, int, tuple[tuple[str, int], ...], tuple[str, ...]]
"""Architecture, CPUs, GPUs by type, features: nodes with equal ones compute equal bits, as far as Slurm can tell."""


class Kind(msgspec.Struct, frozen=True, cache_hash=True):
    """What a run needs from a node. Default: any node. The hash is cached: a plan needs it a million times."""

    arch: str = ""
    "architecture; empty: any, because the run has not started yet"
    gpus: int = 0
    "least number of GPUs on a node"
    part_gpus: int = 0
    "least number of idle GPUs on a shared node; 0: whole nodes only"
    gpu_type: str = ""
    "empty: any"
    constraint: str = ""
    "on features, in the syntax of sbatch; empty: none"
    cpus: int = 0
    "CPUs per node that the script asks for; 0: it does not say (also for memory)"
    memory_mb: int = 0
    reservation: str = ""
    "reservations that the run names, separated by commas; empty: none"
    alike: tuple[Likeness, ...] = ()
    "kinds of nodes that a reproducible run may use, sorted, without duplicates; empty: any"

    def suits(self, node: NodeInfo, part: Part | None = None) -> bool:
        """Return True if the run can use this node, or this part of it."""
        types = node.gpu_types if part is None else {part.gpu_type: part.gpus}
        gpus = types.get(self.gpu_type, 0) if self.gpu_type else node.gpus if part is None else part.gpus
        return (
            (not self.arch or not node.arch or node.arch == self.arch)
            and (gpus >= self.gpus if part is None else 0 < self.part_gpus <= gpus)
            and (not self.gpu_type or self.gpu_type in types)
            and (not self.constraint or suits(node.features, self.constraint))
            and (not self.alike or likeness(node) in self.alike)
            and node.reservation in self.reservation.split(",")
        )

    def share(self, part: Part) -> Part:
        """The piece of an idle part that the run asks for: no more than its script asks for on a node."""
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


def is_open_to(partition: PartitionInfo, groups: Collection[str] | None) -> bool:
    """Return True if a member of these groups may submit to the partition (AllowGroups). None: groups are unknown."""
    return groups is None or not partition.allow_groups or any(group in groups for group in partition.allow_groups)


def may_use(partition: PartitionInfo, account: str, qos: str) -> bool:
    """Return True if jobs of this account and QOS may run in the partition. Empty ones are unknown defaults."""
    return (
        not partition.root_only
        and not partition.requires_reservation
        and (not account or not partition.allow_accounts or account in partition.allow_accounts)
        and account not in partition.deny_accounts
        and (not qos or not partition.allow_qos or qos in partition.allow_qos)
        and qos not in partition.deny_qos
    )


# -- constraints on nodes' features ---------------------------------------------------------------------------------

FeatureTest = Callable[[frozenset[str]], bool]
"""Returns True if a node with these features meets the constraint."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TOKEN = re.compile(r"[^\s&|(),\[\]*]+|[&|(),]")
_COUNT = re.compile(r"\*\d+")


@lru_cache(maxsize=256)
def alternatives(text: str) -> tuple[FeatureTest, ...]:
    """Return the alternatives of a constraint: all nodes of a job must meet the same alternative.

    Examples: `a100&ib`, `[rack1|rack2]`, `(a|b)&c`, `a*2&b*1` (sbatch(1), --constraint). Counts are not checked: a node
    with one of the counted features meets the constraint.

    Only square brackets make more than one alternative. A constraint that cannot be read accepts every node.
    """
    match = _BRACKETS.search(text)
    if match is None:
        return (_feature_test(text),)
    # [a*2&b*4] asks for 2 nodes with a and 4 with b, so each node has one of the two.
    options = [match[1]] if _COUNT.search(match[1]) else match[1].split("|")
    constraints = (f"{text[: match.start()]}({option}){text[match.end() :]}" for option in options)
    return tuple(test for each in constraints for test in alternatives(each))


def suits(features: Iterable[str], constraint: str) -> bool:
    """Return True if a node with these features meets the constraint of a one-node job."""
    return any(test(frozenset(features)) for test in alternatives(constraint))


def _feature_test(text: str) -> FeatureTest:
    if _COUNT.search(text):
        text = _COUNT.sub("", text).replace("&", "|")
    tokens = _TOKEN.findall(text)
    try:
        test = _parse(tokens)
    except ValueError:
        return lambda _: True
    return (lambda _: True) if tokens else test


def _parse(tokens: list[str], level: int = 0) -> FeatureTest:
    """Parse and remove terms joined by `|` (level 0), terms joined by `&` or `,` (1), or a name or bracket (2).

    Raises:
        ValueError: the tokens cannot be read.
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
    test = _parse(tokens)
    if tokens[:1] != [")"]:
        raise ValueError
    del tokens[0]
    return test


_RESERVED = frozenset(("RES", "RESERVED"))


def with_reservations(cluster: ClusterState, names: Collection[str]) -> ClusterState:
    """Return the poll as seen by runs that name these reservations.

    Nodes of such a reservation are open while the reservation lasts, to these runs only (`Kind.suits`).

    Args:
        cluster: one poll.
        names: of reservations; each entry may have several, separated by commas.
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
