"""Runs, and the files by which a head is found (all 0600 in 0700 folders)."""

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
    """Where members listen for each other, as the head's configuration has it (`[network]`). Part of messages."""

    interface: Name = ""
    "in the words of NCCL_SOCKET_IFNAME; empty: any"
    subnet: Name = ""
    "CIDR; empty: any"
    member_ports: Name = ""
    "FIRST-LAST; empty: the kernel chooses"


class HeadFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`STATE/head.json`: where the head is. Rewritten at every start. Agents of an earlier Fallow read it, too."""

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
    "an agent says in its first message on which address its workers will listen"
    stand_in: bool = False
    "an agent has started this head; it gives way to one that is started by hand"


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`STATE/runs/RUN/keys/TOKEN.json`: what an allocation's agents need to reach the head, and newer ones."""

    run: str
    token: str
    kind: AllocationKind
    public_key: str
    secret_key: str
    head_file: str
    "path of head.json, read again when the head does not answer"
    stand_in_after_s: float | None = None
    "the agent starts a head itself when it has heard none for so long; None: never"
    workers_per_node: int | None = None
    "None: one per visible GPU, else one"


class RunSpec(Struct, frozen=True, kw_only=True):
    """What the user asked for; fixed for the life of the run."""

    run: Id
    name: Name
    min_nodes: Nodes
    max_nodes: Nodes
    workers_per_node: Slots | None = None
    harvest_partitions: Few[Name] = []
    "empty: the head's configured ones"
    script: Text = ""
    "the batch script as submitted"
    args: Many[Text] = []
    sbatch_options: Few[Text] = []
    "options of the base submission, in canonical --long=value form, script header included"
    harvest_options: Few[Text] = []
    "the subset that may reach harvest jobs (account, gres, constraint ...)"
    harvest_account: Name = ""
    "of harvest jobs, before what the configuration says; empty: nothing was said"
    environment: Environment = {}
    cwd: Name = ""
    umask: Mode = 0o077
    budget_node_hours: Share | None = None
    weight: Share = 1.0
    "of its gain beside that of other runs of the same project"
    deadline_at: Moment | None = None
    "Unix time by which it should be done"
    outlives_base: bool = False
    "scancel of the base job does not end it"
    min_harvest_minutes: Minutes = 2
    seed: Seed = 0
    local: bool = False
    "True under `fallow local`: no Slurm"
    created_at: Moment = 0.0

    @property
    def harvest_given(self) -> dict[str, str]:
        """`harvest_options` by their long names; the value of a flag is empty."""
        return dict(option.removeprefix("--").partition("=")[::2] for option in self.harvest_options)
