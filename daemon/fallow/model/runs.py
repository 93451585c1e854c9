"""Runs, and the files by which agents and the command line find a head (0600 in 0700 folders)."""

from fallow.model.base import AllocationKind, Struct
from fallow.model.bounds import (
    Environment,
    Few,
    Id,
    Many,
    Minutes,
    Mode,
    Moment,
    Name,
    Nodes,
    Seed,
    Share,
    Slots,
    Text,
)


class DataNetwork(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Where members listen for each other: `[network]` of the configuration. Part of messages."""

    interface: Name = ""
    "in the syntax of NCCL_SOCKET_IFNAME; empty: any"
    subnet: Name = ""
    "CIDR; empty: any"
    member_ports: Name = ""
    "FIRST-LAST; empty: the kernel chooses"


class HeadFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`STATE/head.json`: address of the head, written at its start. Agents of older versions read it, too."""

    version: str
    host: str
    pid: int
    term: int
    endpoint: str
    "ZeroMQ, tcp://ADDRESS:PORT"
    public_key: str
    control: str
    "path of the control socket on `host`"
    started_at: float
    network: DataNetwork = DataNetwork()
    "an agent needs it for its `Hello`, which names the address of its workers"
    stand_in: bool = False
    "an agent has started this head; it ends when the user starts a head"


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`STATE/runs/RUN/keys/TOKEN.json`: keys with which an allocation's agents reach the head and its successors."""

    run: str
    token: str
    kind: AllocationKind
    public_key: str
    secret_key: str
    head_file: str
    "path of head.json, read again when the head does not answer"
    stand_in_after_s: float | None = None
    "seconds without a head after which the agent starts a stand-in head; None: never"
    workers_per_node: int | None = None
    "None: one per visible GPU, or one without GPUs"


class RunSpec(Struct, frozen=True, kw_only=True):
    """The user's request. It does not change during the run."""

    run: Id
    name: Name
    min_nodes: Nodes
    max_nodes: Nodes
    workers_per_node: Slots | None = None
    harvest_partitions: Few[Name] = []
    "empty: the partitions of the head's configuration"
    script: Text = ""
    "batch script as submitted"
    args: Many[Text] = []
    sbatch_options: Few[Text] = []
    "options of the base job as --long=value, including those in the script's header"
    harvest_options: Few[Text] = []
    "subset of the options that harvest jobs get, too (account, gres, constraint ...)"
    harvest_account: Name = ""
    "account of harvest jobs, which overrides the configuration; empty: not set"
    environment: Environment = {}
    cwd: Name = ""
    umask: Mode = 0o077
    budget_node_hours: Share | None = None
    weight: Share = 1.0
    "weight of its gain relative to other runs of the same project"
    deadline_at: Moment | None = None
    "Unix time by which the run should be finished"
    outlives_base: bool = False
    "scancel of the base job does not end the run"
    min_harvest_minutes: Minutes = 2
    seed: Seed = 0
    local: bool = False
    "True under `fallow local`: no Slurm"
    created_at: Moment = 0.0

    @property
    def harvest_given(self) -> dict[str, str]:
        """`harvest_options` by their long names; the value of a flag is empty."""
        return dict(option.removeprefix("--").partition("=")[::2] for option in self.harvest_options)
