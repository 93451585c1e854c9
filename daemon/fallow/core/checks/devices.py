"""The GPUs that a job may use on a node, as environment variables name them, and each worker's share. Pure.

Slurm sets one variable for each kind of GPU that a site has configured, and several if the site has named no kind
(gres.conf, `Flags`). On AMD's GPUs ROCR_VISIBLE_DEVICES is read first, and HIP's variables count within it
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
"""Variables of one job. None of them may reach another job."""

_ROCR = "ROCR_VISIBLE_DEVICES"
_READ_BY_HIP = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_NONE = ("", "NoDevFiles", "-1")


@dataclass(frozen=True)
class Devices:
    """The GPUs of one job on one node.

    Args:
        named: variable -> entries of its list.
        amd: True if the node has AMD's driver.
    """

    named: Mapping[str, tuple[str, ...]]
    amd: bool = False

    @property
    def count(self) -> int:
        """Number of GPUs; 0 if Slurm has named none."""
        return max(map(len, self.named.values()), default=0)

    def share(self, index: int, workers: int) -> dict[str, str]:
        """Variables of worker `index` of `workers`. Every GPU has a worker, and the GPUs of one worker are adjacent."""
        shares = {name: _share(entries, index, workers) for name, entries in self.named.items()}
        if self.amd and _ROCR in shares:
            positions = tuple(map(str, range(len(shares[_ROCR]))))
            shares |= {name: positions for name in _READ_BY_HIP if name in shares}
        return {name: ",".join(entries) for name, entries in shares.items()}


def visible(environ: Mapping[str, str], *, amd: bool) -> Devices:
    """The GPUs that the environment names. Args: amd: True if the node has AMD's driver."""
    texts = {name: environ.get(name, "").strip() for name in VARIABLES}
    named = {name: tuple(part.strip() for part in text.split(",")) for name, text in texts.items() if text not in _NONE}
    return Devices(named, amd)


def _share(entries: tuple[str, ...], index: int, workers: int) -> tuple[str, ...]:
    if len(entries) < workers:
        # More workers than devices are requested: workers share devices.
        return (entries[index % len(entries)],)
    # Every device is used: if devices do not divide evenly, some workers have one more.
    first, end = (len(entries) * number // workers for number in (index, index + 1))
    return entries[first:end]
