"""The GPUs that a node's job may use, as variables name them, and each worker's share. Pure.

Slurm sets one variable for each kind of GPU that a site has configured, and several where the site has named no kind
(gres.conf, `Flags`). On AMD's GPUs ROCR_VISIBLE_DEVICES is read first, and what HIP reads counts within that
(https://rocm.docs.amd.com, "GPU isolation").
"""

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
"""They belong to one job. None of them may reach another."""

_ROCR = "ROCR_VISIBLE_DEVICES"
_READ_BY_HIP = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_NONE = ("", "NoDevFiles", "-1")


@dataclass(frozen=True)
class Devices:
    """The GPUs of one job on one node.

    Args:
        named: variable -> entries of its list.
        amd: the node has AMD's driver.
    """

    named: Mapping[str, tuple[str, ...]]
    amd: bool = False

    @property
    def count(self) -> int:
        """Number of GPUs; 0 if Slurm has named none."""
        return max(map(len, self.named.values()), default=0)

    def share(self, index: int, workers: int) -> dict[str, str]:
        """The variables of worker number `index` of so many: each GPU has a worker, and neighbours stay together."""
        found = {name: _share(entries, index, workers) for name, entries in self.named.items()}
        if self.amd and _ROCR in found:
            within = tuple(map(str, range(len(found[_ROCR]))))
            found |= {name: within for name in _READ_BY_HIP if name in found}
        return {name: ",".join(entries) for name, entries in found.items()}


def visible(environ: Mapping[str, str], *, amd: bool) -> Devices:
    """The GPUs that the environment names; `amd`: the node has AMD's driver."""
    given = {name: environ.get(name, "").strip() for name in VARIABLES}
    named = {name: tuple(part.strip() for part in text.split(",")) for name, text in given.items() if text not in _NONE}
    return Devices(named, amd)


def _share(entries: tuple[str, ...], index: int, workers: int) -> tuple[str, ...]:
    if len(entries) < workers:
        # More workers than devices was asked for: they share.
        return (entries[index % len(entries)],)
    # No device is left over: where they do not divide evenly, some workers have one more.
    first, end = (len(entries) * number // workers for number in (index, index + 1))
    return entries[first:end]
