"""The verdicts of `fallow doctor --gpu`, from facts that the nodes of an allocation report. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from fallow.core.checks.site import Check, Level, judge

_POOR = 0.5
"""Part of the expected bandwidth below which the check warns."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one node, from one of its workers."""

    node: str
    devices: list[str]
    "names of the GPUs; empty: torch sees none"
    rate_gbit_s: float
    "total rate of its network cards; 0: not known"
    findings: dict[str, str]
    "check -> finding in words"
    fixes: dict[str, str]
    "check -> what to do, if something is missing"


class AllReduceTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an all-reduce among all GPUs."""

    ranks: int
    size_bytes: int
    seconds: float
    "of one all-reduce"

    @property
    def bus_gb_s(self) -> float:
        """Bus bandwidth in GB/s: what each GPU sends, whatever their number (nccl-tests, PERFORMANCE.md)."""
        return 2 * (self.ranks - 1) / self.ranks * self.size_bytes / self.seconds / 1e9


class AllocationFacts(msgspec.Struct, frozen=True):
    """Facts of all nodes of an allocation."""

    nodes: list[NodeFacts]
    measured: AllReduceTiming | None
    "None: there is only one GPU"


def verdicts(facts: AllocationFacts, fold: Callable[[Collection[str]], str]) -> list[Check]:
    """All checks, each after the checks it depends on. Args: fold: writes node names as Slurm does."""
    nodes = facts.nodes

    def alike(name: str, texts: Iterable[str], fix: str, level: Level = Level.WARN) -> Check:
        """One text if all nodes say the same, of that `level` if there is a `fix`; else one text per group of nodes."""
        by_text: dict[str, list[str]] = {}
        for one, text in zip(nodes, texts, strict=True):
            by_text.setdefault(text, []).append(one.node)
        if len(by_text) == 1:
            return judge(name, next(iter(by_text)), fix, level)
        differences = "; ".join(f"{fold(node_names)}: {text}" for text, node_names in by_text.items())
        differing = "the nodes differ: a run with reproducible=True may refuse some of them"
        return Check(name, Level.WARN, differences, fix or differing)

    no_gpus = "" if any(one.devices for one in nodes) else "ask for GPUs: --gpus-per-node=N"
    checks = [alike("GPUs", map(_devices, nodes), no_gpus, Level.FAIL)]
    for name in dict.fromkeys(name for one in nodes for name in one.findings):
        fixes = (one.fixes[name] for one in nodes if name in one.fixes)
        checks.append(alike(name, (one.findings.get(name, "none") for one in nodes), next(fixes, "")))
    return checks if facts.measured is None else [*checks, _bandwidth(facts.measured, nodes)]


def _bandwidth(measured: AllReduceTiming, nodes: Sequence[NodeFacts]) -> Check:
    """Compare with the bus bandwidth that the network allows each GPU.

    A ring enters and leaves each node once, over all cards of the node. So a GPU gets at most the total rate of the
    slowest node's cards.
    """
    text = (
        f"{measured.bus_gb_s:.3g} GB/s bus bandwidth ({measured.size_bytes / 2**20:.0f} MiB among {measured.ranks} on "
        f"{len(nodes)} node{'s' * (len(nodes) > 1)})"
    )
    expected_gb_s = min(one.rate_gbit_s for one in nodes) / 8 if len(nodes) > 1 else 0.0
    if not expected_gb_s:
        return judge("all-reduce", text)
    fix = "NCCL_DEBUG=INFO shows the cards and paths in use; NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose the cards"
    text += f", the network cards allow {expected_gb_s:.3g} GB/s"
    return judge("all-reduce", text, fix if measured.bus_gb_s < _POOR * expected_gb_s else "")


def _devices(one: NodeFacts) -> str:
    kinds = {name: one.devices.count(name) for name in one.devices}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "torch sees none"
