"""Sees what a script adds to modules while a run.steps loop is at work: parameters, and modules that have some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@contextmanager
def additions_seen(added: Callable[[nn.Module, str, list[nn.Parameter]], None]) -> Iterator[None]:
    """While the context is open, `added(module, name, parameters)` is called before any module gets them."""

    def module_added(module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is not None:
            added(module, name, list(part.parameters()))

    def parameter_added(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        added(module, name, [parameter])

    with ExitStack() as stack:
        stack.callback(register_module_module_registration_hook(module_added).remove)
        stack.callback(register_module_parameter_registration_hook(parameter_added).remove)
        yield
