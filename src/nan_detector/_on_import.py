"""Do something as soon as a module has been imported, without importing it oneself.

A script decides when torch is loaded, and after what: ``OMP_NUM_THREADS``, ``CUDA_VISIBLE_DEVICES`` and their like are
read at that moment, and a script that sets them first would compute other numbers if torch were there already.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def on_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` once module `name` has been imported: now, if it has been already.

    Args:
        name: Full name of the module.
        then: Called once, at the end of the import, on the thread that imports.

    Returns:
        A function that calls it off.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(MetaPathFinder):
    """Finds `name` where the other finders find it, and has its loader tell when it is done."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Telling(spec.loader, self._imported)  # type: ignore[arg-type]  # it has `exec_module`
        return spec

    def leave(self) -> None:
        """Find nothing more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self) -> None:
        if self in sys.meta_path:
            self.leave()
            self.then()


class _Telling(Loader):
    """A loader in another's place while the module is executed."""

    def __init__(self, loader: Loader, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done()
