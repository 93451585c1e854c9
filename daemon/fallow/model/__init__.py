"""The vocabulary: frozen structs and enums shared by every layer.

These types are part of messages (`core.protocol`) and of stored records (`core.records`), and they are the JSON of the
command line. They hold no behaviour beyond trivial derived values.

Words: a *run* is one elastic training; a *job* is a Slurm job; an *allocation* is one job held for a run (`base`:
what the user asked for, `harvest`: one node picked up idle); an *agent* is one process per node; a *worker* is one
training process; a *member* is a node, its agent with all its workers, of the current *generation*. See
`docs/architecture.md`.

Times: fields ending in `_s` are seconds (float). Points in time that cross a process border are either Unix
seconds (`*_at`, for people) or relative (`*_in_s`, for decisions), so that clock skew never moves a deadline.
"""

from __future__ import annotations

from fallow.model.base import (
    ACCOUNT_PATTERN,
    HIDDEN,
    ID_PATTERN,
    OUTPUT_PIPES,
    SHOWN,
    STACK_SIGNAL,
    AllocationKind,
    AllocationState,
    ChangeKind,
    Doing,
    Exit,
    FallowError,
    MemberPhase,
    Parts,
    RunStatus,
    Struct,
)
from fallow.model.cluster import (
    ClusterConfig,
    ClusterState,
    JobInfo,
    JobRequest,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
)
from fallow.model.estimate import BaseStart, DryRun, Prospect, WouldAsk
from fallow.model.runs import (
    DataNetwork,
    HeadFile,
    KeyFile,
    RunSpec,
)
from fallow.model.simulate import DelayedJobs, PolicyScore, Score, SimReport, TraceRead
from fallow.model.usage import (
    PRUNED,
    Amount,
    DelayReport,
    LimitView,
    OwnerView,
    PriorityView,
    ShareView,
    Source,
    UsageReport,
    UsageRow,
)
from fallow.model.views import (
    AllocationView,
    CheckpointState,
    CheckpointView,
    EventRecord,
    GenerationReport,
    HeadView,
    InternalError,
    MemberView,
    NewEvent,
    NodeOwner,
    NodeView,
    PauseReport,
    Quantiles,
    RollbackReport,
    RunReport,
    RunView,
    SampleReport,
    Snapshot,
    SpeedView,
)

__all__ = [
    "ACCOUNT_PATTERN",
    "HIDDEN",
    "ID_PATTERN",
    "OUTPUT_PIPES",
    "PRUNED",
    "SHOWN",
    "STACK_SIGNAL",
    "AllocationKind",
    "AllocationState",
    "AllocationView",
    "Amount",
    "BaseStart",
    "ChangeKind",
    "CheckpointState",
    "CheckpointView",
    "ClusterConfig",
    "ClusterState",
    "DataNetwork",
    "DelayReport",
    "DelayedJobs",
    "Doing",
    "DryRun",
    "EventRecord",
    "Exit",
    "FallowError",
    "GenerationReport",
    "HeadFile",
    "HeadView",
    "InternalError",
    "JobInfo",
    "JobRequest",
    "KeyFile",
    "LimitView",
    "MemberPhase",
    "MemberView",
    "NewEvent",
    "NodeInfo",
    "NodeOwner",
    "NodeView",
    "OwnerView",
    "PartitionInfo",
    "Parts",
    "PauseReport",
    "PolicyScore",
    "PriorityView",
    "Prospect",
    "Quantiles",
    "ReservationInfo",
    "RollbackReport",
    "RunReport",
    "RunSpec",
    "RunStatus",
    "RunView",
    "SampleReport",
    "Score",
    "ShareView",
    "SimReport",
    "Snapshot",
    "Source",
    "SpeedView",
    "Struct",
    "TraceRead",
    "UsageReport",
    "UsageRow",
    "WouldAsk",
]
