"""The store of torchrun's agents of one generation: that of their scripts, but every wait ends with the generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_LOOK_S = 1.0
"""A wait looks so often whether its generation is over."""

_LOST_S = 0.1
"""The member that has the store is gone: the head will say what comes next."""

_PATIENCE_S = 300.0
"""Torch's own."""

_SCRIPT_ENDED = "torchelastic/agent/terminal_state"
"""Beginning of what torchrun's agent writes into its store when its script has ended well, and then alone."""


class AgentStore(Store):
    """Of one agent.

    Args:
        store: what all agents of the generation have.
        check: called again and again in a wait; raises DistStoreError once the generation is over.
        script_ended: called when this agent's script has ended well.
    """

    def __init__(self, store: Store, check: Callable[[], None], script_ended: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check
        self._script_ended = script_ended
        self._patience_s = _PATIENCE_S

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        if key.startswith(_SCRIPT_ENDED):
            self._script_ended()
        return self._store.add(key, amount)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._await(keys, self._patience_s)
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout.total_seconds() if timeout else self._patience_s)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience_s = timeout.total_seconds()

    def _await(self, keys: list[str], patience_s: float) -> None:
        end = time.monotonic() + patience_s
        while (left_s := end - time.monotonic()) > 0:
            try:
                self._store.wait(keys, timedelta(seconds=min(left_s, _LOOK_S)))
                return
            except DistStoreError:
                self._check()
            except RuntimeError:
                self._check()
                time.sleep(_LOST_S)
        raise DistStoreError(f"{', '.join(keys)} did not come within {patience_s:g} s")
