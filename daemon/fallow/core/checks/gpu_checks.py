"""What `fallow doctor --gpu` concludes from what the nodes of an allocation say of themselves. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from fallow.core.checks.site import Check, Level, judged

_POOR = 0.5
"""Part of the expected bandwidth below which something is wrong."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as one of its workers sees it."""

    node: str
    devices: list[str]
    "names of the GPUs; empty: torch sees none"
    rate_gbit_s: float
    "what its network cards carry together; 0: not known"
    says: dict[str, str]
    "check -> what it found, in words"
    fixes: dict[str, str]
    "check -> what to do, where something is missing"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce among all GPUs."""

    ranks: int
    size_bytes: int
    seconds: float
    "of one"

    @property
    def bus_gb_s(self) -> float:
        """Bus bandwidth: bytes/s that each GPU sends, whatever their number (nccl-tests, PERFORMANCE.md)."""
        return 2 * (self.ranks - 1) / self.ranks * self.size_bytes / self.seconds / 1e9


class Found(msgspec.Struct, frozen=True):
    """What the nodes have found together."""

    nodes: list[NodeFacts]
    measured: Measured | None
    "None: there is one GPU only"


def verdicts(found: Found, fold: Callable[[Collection[str]], str]) -> list[Check]:
    """All checks, in the order in which things depend on each other; `fold` writes names of nodes as Slurm does."""
    nodes = found.nodes

    def alike(name: str, said: Iterable[str], fix: str, level: Level = Level.WARN) -> Check:
        """One line where all nodes say the same, of that `level` if there is a `fix`; else what each says."""
        by_text: dict[str, list[str]] = {}
        for one, text in zip(nodes, said, strict=True):
            by_text.setdefault(text, []).append(one.node)
        if len(by_text) == 1:
            return judged(name, next(iter(by_text)), fix, level)
        shown = "; ".join(f"{fold(there)}: {text}" for text, there in by_text.items())
        return Check(name, Level.WARN, shown, fix or "the nodes differ: reproducible=True may refuse some of them")

    no_gpus = "" if any(one.devices for one in nodes) else "ask for GPUs: --gpus-per-node=N"
    checks = [alike("GPUs", map(_devices, nodes), no_gpus, Level.FAIL)]
    for name in dict.fromkeys(name for one in nodes for name in one.says):
        fixes = (one.fixes[name] for one in nodes if name in one.fixes)
        checks.append(alike(name, (one.says.get(name, "none") for one in nodes), next(fixes, "")))
    return checks if found.measured is None else [*checks, _bandwidth(found.measured, nodes)]


def _bandwidth(measured: Measured, nodes: Sequence[NodeFacts]) -> Check:
    """Compare with the bus bandwidth that the network allows each GPU.

    A ring enters and leaves each node once, over all of its cards, so a GPU gets at most what the slowest node's cards
    carry together.
    """
    text = (
        f"{measured.bus_gb_s:.3g} GB/s bus bandwidth ({measured.size_bytes / 2**20:.0f} MiB among {measured.ranks} on "
        f"{len(nodes)} node{'s' * (len(nodes) > 1)})"
    )
    expected_gb_s = min(one.rate_gbit_s for one in nodes) / 8 if len(nodes) > 1 else 0.0
    if not expected_gb_s:
        return judged("all-reduce", text)
    fix = "see with NCCL_DEBUG=INFO which cards and paths are used; NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose them"
    text += f", the network cards allow {expected_gb_s:.3g} GB/s"
    return judged("all-reduce", text, fix if measured.bus_gb_s < _POOR * expected_gb_s else "")


def _devices(one: NodeFacts) -> str:
    kinds = {name: one.devices.count(name) for name in one.devices}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "torch sees none"
