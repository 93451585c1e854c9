"""Errors of members that do not go the same way: none of them is a node's own failure."""

from __future__ import annotations

from fallow.model import Exit, FallowError

APART = "apart: "
"""Signatures that begin so are of a member that found that the members do not follow the script together."""


class Apart(FallowError):
    """The members do not follow the script together: no member's own failure."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)


STRANGER = "stranger: "
"""Signatures that begin so are of a newcomer that follows another script, or other arguments, than the members."""


class Stranger(FallowError):
    """A newcomer follows another script, or other arguments, than the members: they go on without it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.DATA)
