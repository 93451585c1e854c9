"""What `fallow doctor --gpu` concludes from what the nodes of an allocation say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from fallow.core.checks.site import Check, Level, judged

_POOR = 0.5
"""Part of the expected bandwidth below which something is wrong."""


class Link(msgspec.Struct, frozen=True):
    """A network interface that is up."""

    name: str
    kind: str
    "infiniband (also RoCE and Slingshot's verbs) or ethernet"
    gbit_s: float


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as one of its workers sees it."""

    node: str
    devices: list[str]
    "names of the GPUs; empty: torch sees none"
    driver: str
    "of the GPUs; empty: none is loaded"
    runtime: str
    "that torch was built for, e.g. CUDA 13.0; empty: torch is for processors only"
    library: str
    "e.g. NCCL 2.29.3; empty: torch has none"
    communicator: str
    "what gradients go through, and why"
    links: list[Link]
    peer_memory: str
    "how network cards reach the GPUs' memory; empty: not seen"
    variables: dict[str, str]
    "of NCCL and of the data network"
    compiling: list[str]
    "what torch.compile needs and does not find"


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

    def alike(name: str, say: Callable[[NodeFacts], str], fix: str = "", level: Level = Level.WARN) -> Check:
        """One line where all nodes say the same, of that `level` if there is a `fix`; else what each says."""
        by_text: dict[str, list[str]] = {}
        for one in nodes:
            by_text.setdefault(say(one), []).append(one.node)
        if len(by_text) == 1:
            return judged(name, next(iter(by_text)), fix, level)
        shown = "; ".join(f"{fold(there)}: {text}" for text, there in by_text.items())
        return Check(name, Level.WARN, shown, fix or "the nodes differ: reproducible=True may refuse some of them")

    no_gpus = "" if any(one.devices for one in nodes) else "ask for GPUs: --gpus-per-node=N"
    headers = "install a C compiler and Python's headers (Debian and Ubuntu: gcc, python3-dev)"
    checks = [
        alike("GPUs", _devices, no_gpus, Level.FAIL),
        alike("driver", lambda one: one.driver or "none is loaded"),
        alike("torch", lambda one: f"for {one.runtime or 'processors only'}", _build_fix(nodes)),
        alike("torch.compile", _compiling, headers if any(one.compiling for one in nodes) else ""),
        alike("collectives", lambda one: one.library or "no library for GPUs in this torch"),
        alike("gradients", lambda one: one.communicator),
        alike("network", lambda one: ", ".join(map(_link, one.links)) or "no interface with a known rate"),
        alike("GPUDirect", lambda one: one.peer_memory or "not seen (NCCL_DEBUG=INFO tells what is used)"),
    ]
    if any(one.variables for one in nodes):
        checks.append(alike("variables", lambda one: " ".join(f"{n}={v}" for n, v in one.variables.items()) or "none"))
    if found.measured is not None:
        checks.append(_bandwidth(found.measured, nodes))
    return checks


def expected_gb_s(nodes: Sequence[NodeFacts], ranks: int) -> float | None:
    """Bus bandwidth that the network allows each GPU; None: one node only, or no rate is known.

    A ring enters and leaves each node once, over all of its cards, so a GPU gets at most what the slowest node's cards
    carry together. InfiniBand counts where a node has it, else the fastest interface.
    """
    if len(nodes) < 2 or ranks < 2:
        return None
    rates = [_rate(one.links) for one in nodes]
    return min(rates) / 8 if all(rates) else None


def _rate(links: Sequence[Link]) -> float:
    cards = [link.gbit_s for link in links if link.kind == "infiniband"]
    return sum(cards) if cards else max((link.gbit_s for link in links), default=0.0)


def _bandwidth(measured: Measured, nodes: Sequence[NodeFacts]) -> Check:
    expected = expected_gb_s(nodes, measured.ranks)
    text = (
        f"{measured.bus_gb_s:.3g} GB/s bus bandwidth ({measured.size_bytes / 2**20:.0f} MiB among {measured.ranks} on "
        f"{len(nodes)} node{'s' * (len(nodes) > 1)})"
    )
    if expected is None:
        return judged("all-reduce", text)
    fix = "see with NCCL_DEBUG=INFO which cards and paths are used; NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose them"
    text += f", the network cards allow {expected:.3g} GB/s"
    return judged("all-reduce", text, fix if measured.bus_gb_s < _POOR * expected else "")


def _devices(one: NodeFacts) -> str:
    kinds = {name: one.devices.count(name) for name in one.devices}
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "torch sees none"


def _compiling(one: NodeFacts) -> str:
    return f"{' and '.join(one.compiling)} missing" if one.compiling else "finds a C compiler and Python.h"


def _build_fix(nodes: Sequence[NodeFacts]) -> str:
    wanting = any(one.driver and not one.runtime for one in nodes)
    return "install a build of torch for these GPUs: https://pytorch.org/get-started" if wanting else ""


def _link(link: Link) -> str:
    return f"{link.name} {link.gbit_s:g} Gbit/s {link.kind}"
