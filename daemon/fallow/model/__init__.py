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

from fallow.model.base import *
from fallow.model.cluster import *
from fallow.model.reports import *
from fallow.model.runs import *
from fallow.model.views import *
