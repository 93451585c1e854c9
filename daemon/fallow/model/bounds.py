"""Bounds of the numbers, texts and lists that cross a boundary: control socket, ZeroMQ and store.

A field of one of these types is checked where bytes become objects, so what is behind that can rely on it. A number
within its bounds can be added, multiplied by a few thousand and written to the store or to JSON again.
"""

from typing import Annotated, TypeVar

from msgspec import Meta

T = TypeVar("T")

MOST = 2**53 - 1
"""The largest whole number that every reader of JSON keeps."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
"""Steps, generations, samples, bytes, process ids."""

Positive = Annotated[int, Meta(ge=1, le=1_000_000)]
"""At least one, of things that are handed out one by one."""

Nodes = Annotated[int, Meta(ge=0, le=1_000_000)]
"""Nodes of a run; beyond every cluster. A run of no node at all is refused with words of its own."""

MOST_SLOTS, MOST_MINUTES, MOST_SEED, MOST_SHARE = 1024, 10_000_000, 2**63 - 1, 1e9
"""Of numbers that people write into scripts, where they are told of the bound in words."""

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
"""A length of time. Neither infinite nor NaN."""

Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""The difference of two times, which a race may make negative."""

Moment = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Unix time."""

Rate = Annotated[float, Meta(ge=0.0, le=1e18)]
"""So many in a second."""

Share = Annotated[float, Meta(ge=0.0, le=MOST_SHARE)]
"""A weight, or node-hours."""

Id = Annotated[str, Meta(max_length=255, pattern=r"^[^\x00-\x20\x7f/]*\Z")]
"""A run, token, worker, agent, node or key: one word, and no part of a path."""

Key = Annotated[str, Meta(min_length=40, max_length=40)]
"""A public key (Z85)."""

Name = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*\Z")]
"""What a person called something, a path, or an address."""

Prose = Annotated[str, Meta(max_length=200_000)]
"""Words for people: reasons, messages, tracebacks."""

Text = Annotated[str, Meta(max_length=1 << 20, pattern=r"^[^\x00]*\Z")]
"""A whole script, or the value of a variable."""

Blob = Annotated[bytes, Meta(max_length=1 << 18)]
"""One part of a gather."""

Few = Annotated[list[T], Meta(max_length=1024)]
"""Options, partitions, facts."""

Many = Annotated[list[T], Meta(max_length=100_000)]
"""Nodes, workers, tensors, keys."""

Scalars = Annotated[dict[Name, float], Meta(max_length=100_000)]
"""What a script logs; it may log NaN."""

Fractions = Annotated[dict[Name, Annotated[float, Meta(ge=0.0, le=1.0)]], Meta(max_length=1024)]
"""Parts of one, by name."""

Environment = Annotated[dict[Name, Text], Meta(max_length=100_000)]
