"""CURVE key pairs, as Z85 text."""

from __future__ import annotations

from typing import NamedTuple

import zmq

KEY_LENGTH = 40
"Characters of a Z85 key."


class KeyPair(NamedTuple):
    """`public` may be told to anybody; `secret` is in private files only."""

    public: str
    secret: str


def new_keypair() -> KeyPair:
    """A fresh key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")
