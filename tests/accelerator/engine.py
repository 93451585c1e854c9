"""What the engine does with results that may turn out to be garbage."""

from __future__ import annotations

from functools import wraps
from typing import Any

import accelerator
from fallow.worker.reduction.exact import Exact


def permit_speculation() -> None:
    """From now on, exact sums may be turned into gradients before it is certain that they are good.

    The host does not wait between the two halves of a sum: the second half is queued behind the first, and both are
    void if the communicator ends. Its result is gathered by that communicator, so garbage is still found in gradients.
    """
    conclude = Exact.conclude

    @wraps(conclude)
    def speculative(*args: Any) -> None:
        with accelerator.speculating():
            conclude(*args)

    Exact.conclude = speculative  # type: ignore[method-assign]
