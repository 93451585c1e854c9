"""Optimizers, moving averages and GradScalers that a body uses though they were not prepared.

Averages and scalers would act once per shard, and a member that joins would not have their state. Which of them may be
used all the same is told by `watch`, which also finds schedulers of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

_ACTING = (
    (AveragedModel, "update_parameters"),
    *((torch.amp.GradScaler, name) for name in ("unscale_", "step", "update")),
)


@contextmanager
def acting_seen(acts: Callable[[Any], None]) -> Iterator[None]:
    """While the context is open, `acts` is called with each optimizer, average and scaler that is about to act.

    Not with prepared averages and scalers, whose methods are other ones by now.
    """
    with ExitStack() as stack:
        hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: acts(optimizer))
        stack.callback(hook.remove)
        for cls, name in _ACTING:
            inner = cls.__dict__.get(name)
            if inner is not None:
                setattr(cls, name, _told(inner, acts))
                stack.callback(setattr, cls, name, inner)
        yield


def _told(inner: Callable[..., Any], acts: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(inner)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        acts(self)
        return inner(self, *args, **kwargs)

    return told
