"""Who can be served with which kinds of nodes: a flow from kinds to claims, changed along augmenting paths. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Flow:
    """Nodes given to claims, so far.

    Args:
        kinds: of nodes that each claim can use.
        supply: nodes of each kind.
        cap: nodes in all; None: no cap.
    """

    def __init__(self, kinds: Sequence[Sequence[int]], supply: Sequence[int], cap: int | None = None) -> None:
        users = [0] * len(supply)
        for some in kinds:
            for kind in some:
                users[kind] += 1
        # What few can use is taken first, so that others seldom have to be moved.
        self._kinds = [sorted(some, key=lambda kind: (users[kind], kind)) for some in kinds]
        self._free = list(supply)
        self._cap = sum(supply) if cap is None else min(cap, sum(supply))
        self._uses: list[dict[int, int]] = [{} for _ in kinds]
        self._users: list[set[int]] = [set() for _ in supply]
        self._dead: set[int] = set()
        "kinds from which no path leads to a free node"

    @property
    def left(self) -> int:
        """Nodes that could still be taken, if somebody can use them."""
        return self._cap

    def uses(self, claim: int) -> dict[int, int]:
        """Kind -> nodes of that kind that a claim has."""
        return self._uses[claim]

    def take(self, claim: int, amount: int) -> int:
        """Give a claim as many more nodes as can be, up to `amount`; returns how many."""
        wanted = min(amount, self._cap)
        missing = wanted
        for kind in self._kinds[claim]:
            if not missing:
                break
            got = min(missing, self._free[kind])
            if got:
                self._move(claim, kind, got)
                self._free[kind] -= got
                missing -= got
        while missing:
            got = self._augment(claim, missing)
            if not got:
                break
            missing -= got
        self._cap -= wanted - missing
        return wanted - missing

    def give(self, claim: int, amount: int) -> None:
        """Take nodes from a claim, those first that most could use."""
        self._cap += amount
        if amount:
            self._dead.clear()
        for kind in reversed(self._kinds[claim]):
            got = min(amount, self._uses[claim].get(kind, 0))
            if got:
                self._move(claim, kind, -got)
                self._free[kind] += got
                amount -= got

    def _move(self, claim: int, kind: int, amount: int) -> None:
        have = self._uses[claim].get(kind, 0) + amount
        self._uses[claim][kind] = have
        if have:
            self._users[kind].add(claim)
        else:
            self._users[kind].discard(claim)

    def _augment(self, claim: int, amount: int) -> int:
        """Free nodes for a claim by moving others to kinds that they can use, too; returns how many."""
        came: dict[int, tuple[int, int] | None] = {k: None for k in self._kinds[claim] if k not in self._dead}
        queue = deque(came)
        while queue:
            kind = queue.popleft()
            if self._free[kind]:
                return self._shift(claim, kind, came, amount)
            for user in self._users[kind]:
                for other in self._kinds[user]:
                    if other not in came and other not in self._dead:
                        came[other] = user, kind
                        queue.append(other)
        self._dead.update(came)
        return 0

    def _shift(self, claim: int, end: int, came: dict[int, tuple[int, int] | None], amount: int) -> int:
        path: list[tuple[int, int, int]] = []
        kind = end
        while (step := came[kind]) is not None:
            user, before = step
            path.append((user, before, kind))
            kind = before
        got = min([amount, self._free[end], *(self._uses[user][before] for user, before, _ in path)])
        for user, before, after in path:
            self._move(user, before, -got)
            self._move(user, after, got)
        self._move(claim, kind, got)
        self._free[end] -= got
        return got
