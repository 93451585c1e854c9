"""Bounds of numbers, texts and lists in messages: control socket, ZeroMQ and store.

Decoding checks a field of one of these types, so the code behind can rely on the bounds. A number within its bounds can
be added, multiplied by a few thousand, and written to the store or to JSON again.
"""

from typing import Annotated, TypeVar

from msgspec import Meta

T = TypeVar("T")

MOST = 2**53 - 1
"""Largest integer that every JSON parser represents exactly."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
"""Steps, generations, samples, bytes, process ids."""

Positive = Annotated[int, Meta(ge=1, le=1_000_000)]
"""A count of at least one."""

Nodes = Annotated[int, Meta(ge=0, le=1_000_000)]
"""Nodes of a run. The upper bound exceeds every cluster; 0 is refused elsewhere, with its own message."""

MOST_SLOTS, MOST_MINUTES, MOST_SEED, MOST_SHARE = 1024, 10_000_000, 2**63 - 1, 1e9
"""Upper bounds of numbers in scripts; the check of scripts names the bound."""

Slots = Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
"""Workers of one node."""

Shards = Annotated[int, Meta(ge=0, le=2**31)]
"""Shards of one step, and samples of one global batch."""

Minutes = Annotated[int, Meta(ge=1, le=MOST_MINUTES)]

Mode = Annotated[int, Meta(ge=0, le=0o7777)]

Seed = Annotated[int, Meta(ge=0, le=MOST_SEED)]

Code = Annotated[int, Meta(ge=-(2**31), le=2**31)]
"""An exit code or the number of a signal."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A duration. Neither infinite nor NaN."""

Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Difference of two times. A race may make it negative."""

Moment = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Unix time."""

Rate = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Number per second."""

Share = Annotated[float, Meta(ge=0.0, le=MOST_SHARE)]
"""A weight, or a number of node-hours."""

Id = Annotated[str, Meta(max_length=255, pattern=r"^[^\x00-\x20\x7f/]*\Z")]
"""Id of a run, token, worker, agent, node or key: one word without /, so that it is safe in a path."""

Key = Annotated[str, Meta(min_length=40, max_length=40)]
"""A public key (Z85)."""

Name = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*\Z")]
"""A name that a person chose, a path, or an address."""

Prose = Annotated[str, Meta(max_length=200_000)]
"""Text for people: reasons, messages, tracebacks."""

Text = Annotated[str, Meta(max_length=1 << 20, pattern=r"^[^\x00]*\Z")]
"""A whole script, or the value of a variable."""

Blob = Annotated[bytes, Meta(max_length=1 << 18)]
"""One part of a gather."""

Few = Annotated[list[T], Meta(max_length=1024)]
"""Options, partitions, facts."""

Many = Annotated[list[T], Meta(max_length=100_000)]
"""Nodes, workers, tensors, keys."""

Scalars = Annotated[dict[Name, float], Meta(max_length=100_000)]
"""Values that a script logs, by name; NaN is allowed."""

Fractions = Annotated[dict[Name, Annotated[float, Meta(ge=0.0, le=1.0)]], Meta(max_length=1024)]
"""Fractions (0..1), by name."""

Environment = Annotated[dict[Name, Text], Meta(max_length=100_000)]
