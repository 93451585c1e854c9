"""Defers the import of torch's compiler until a script uses it.

Every optimizer of torch imports `torch._dynamo`: 900 modules, which take as long as `import torch`. Without compilation
it uses only two calls that do nothing: `disable` (`torch/_compile.py`) and `graph_break` (`torch/optim/optimizer.py`).
Each new worker would pay for this import while its node waits. So a stand-in module provides these two calls. Any other
use (`torch.compile`, a submodule, DDP, another name) replaces the stand-in by the real module, and removes the
stand-in's answers that torch has cached.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"

_ANSWER = "__dynamo_disable"
"""Attribute of a function in which `torch._compile` caches the result of `disable`."""


class _StandIn(ModuleType):
    """Replacement of `torch._dynamo` as long as nothing is compiled."""

    def __init__(self) -> None:
        super().__init__(_NAME, "Stands in for torch._dynamo until something is compiled.")
        self._disabled: list[Any] = []
        self._loading = threading.RLock()

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: without tracing there is no graph to break."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return `fn` itself for the call of `torch._compile`: nothing traces it. Forward any other call."""
        if fn is None or options != {"wrapping": False}:
            return self._real().disable(fn, recursive, **options)
        self._disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        # `inspect` and `warnings` ask every module for __file__ and similar names. The import system needs __path__ to
        # find submodules, but also asks for it before this module is in sys.modules.
        if name.startswith("__") and (name != "__path__" or sys.modules.get(_NAME) is not self):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        """Replace this stand-in by the real module."""
        with self._loading:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                importlib.import_module(_NAME)
                for fn in self._disabled:
                    if getattr(fn, _ANSWER, None) is fn:
                        delattr(fn, _ANSWER)
                self._disabled.clear()
        return sys.modules[_NAME]


class _Finder(MetaPathFinder, Loader):
    """Import hook: finds the stand-in, once, and later the already imported submodules of the real module.

    `import torch._dynamo.config` first asks the stand-in for its __path__. This imports the real module with most
    submodules. The import system would then create a second `config` module; this hook returns the existing one.
    """

    def __init__(self) -> None:
        self._has_stand_in = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _NAME and not self._has_stand_in:
            self._has_stand_in = True
            return ModuleSpec(name, self, loader_state=_StandIn())
        if name.startswith(_NAME + ".") and name in sys.modules:
            return ModuleSpec(name, self, loader_state=sys.modules[name])
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module by the existing one."""
        assert module.__spec__ is not None
        replacement = sys.modules[module.__name__] = module.__spec__.loader_state
        if replacement.__spec__ is None:  # the stand-in
            replacement.__spec__ = module.__spec__


def defer_compiler_import() -> None:
    """Import `torch._dynamo` only when it is needed. No effect if it is already imported."""
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())
