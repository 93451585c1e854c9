"""The vocabulary: frozen structs and enums that all layers share.

These types are part of messages (`core.protocol`), of stored records (`core.records`) and of the command line's JSON.
They have no behaviour beyond trivial derived values.

Words: a *run* is one elastic training. A *job* is a Slurm job. An *allocation* is one job that a run holds (`base`: the
user's own job, `harvest`: one idle node). An *agent* is one process per node, a *worker* one training process. A
*member* is a node (its agent and all its workers) that trains in the current *generation*. See `docs/architecture.md`.

Times: fields ending in `_s` are seconds (float). A point in time in a message is either Unix seconds (`*_at`, for
people) or relative (`*_in_s`, for decisions), so that clock skew never moves a deadline.
"""

from fallow.model.base import *
from fallow.model.cluster import *
from fallow.model.reports import *
from fallow.model.runs import *
from fallow.model.views import *
