"""Who may join: newcomers whose model is the members'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from fallow.core.membership.messages import Contract


def difference(members: Contract, newcomer: Contract) -> str | None:
    """Why a newcomer cannot join: the first thing in which its contract differs; None: it can."""
    if (newcomer.global_batch, newcomer.shards) != (members.global_batch, members.shards):
        return (
            f"its global batch is {newcomer.global_batch} in {newcomer.shards} shards, the members' is "
            f"{members.global_batch} in {members.shards}; start it with the same arguments"
        )
    if newcomer.restarts != members.restarts:
        return "it is started with other arguments than the members: --restart must be given to all or to none"
    if newcomer.signature == members.signature:
        return other_bits(members.arithmetic, newcomer.arithmetic)
    for mine, theirs in zip(newcomer.layout, members.layout, strict=False):
        if mine != theirs:
            return f"its model differs from the members': it has {mine}, they have {theirs}"
    return f"its prepared state has {len(newcomer.layout)} tensors, the members' has {len(members.layout)}"


def other_bits(members: Sequence[str], newcomer: Sequence[str]) -> str | None:
    """Why a newcomer's results would differ in the last bits, in a reproducible run.

    Args:
        members: their arithmetic signature, a line per fact; empty: their run is not reproducible.
        newcomer: its own.
    """
    if bool(members) != bool(newcomer):
        ours, theirs = bool(newcomer), bool(members)
        return f"it says reproducible={ours}, the members reproducible={theirs}; start it with the same arguments"
    for mine, theirs_line in zip_longest(newcomer, members, fillvalue="nothing of the kind"):
        if mine != theirs_line:
            return (
                f"the run is reproducible, so all members must compute the same bits: it computes with {mine}, the "
                f"members with {theirs_line}; give the run nodes and settings of one kind"
            )
    return None
