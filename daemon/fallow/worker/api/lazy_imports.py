"""torch's compiler is imported when something asks for it, not when an optimizer is made.

Every optimizer of torch imports `torch._dynamo`, 900 modules and as long as `import torch` itself takes again, for two
calls that mean nothing where nothing is compiled: `disable` (`torch/_compile.py`) and `graph_break`
(`torch/optim/optimizer.py`). A newcomer would do so at every start, while its node waits. So a module stands in for it
that knows just these two, and makes way for the real one as soon as anything else of it is used: `torch.compile`, a
submodule, DDP, any other name. What torch has kept of the stand-in's answers is taken back then.
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
"""Where `torch._compile` keeps what `disable` answered: an attribute of the function that it was asked about."""


class _StandIn(ModuleType):
    """`torch._dynamo` as long as nothing is compiled."""

    def __init__(self) -> None:
        super().__init__(_NAME, "Stands in for torch._dynamo until something is compiled.")
        self._disabled: list[Any] = []
        self._loading = threading.RLock()

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced, so nothing is cut."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """The function itself: nothing traces it. As `torch._compile` asks; others get the real one's answer."""
        if fn is None or options != {"wrapping": False}:
            return self._real().disable(fn, recursive, **options)
        self._disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        # `inspect` and `warnings` ask every module for its __file__ and the like. The import system needs the __path__
        # for submodules, but asks for it, too, while it has yet to put this one into its place.
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
    """Finds the stand-in, once, and the submodules of what has taken its place: modules that have been made.

    The import system takes a submodule's path from the package that it has: for `import torch._dynamo.config` that
    brings in the real one, and with it most submodules. It would make a second one of the module that was asked for.
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
        """Put the module that has been made in the place of the one that the import system has just made."""
        assert module.__spec__ is not None
        replacement = sys.modules[module.__name__] = module.__spec__.loader_state
        if replacement.__spec__ is None:  # the stand-in
            replacement.__spec__ = module.__spec__


def defer_compiler_import() -> None:
    """From now on `torch._dynamo` is imported when something of it is needed; without effect where it is there."""
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())
