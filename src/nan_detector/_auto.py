"""Find the models of a script that nobody changed, and watch them: a model is what is called outermost and trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._detector import NaNDetector
from nan_detector._errors import NonFiniteError
from nan_detector._state import BUG, is_replaying, logger, strict, switched_off

#: Training calls without a new model after which the search ends until a step of unknown parameters shows up.
SETTLED_CALLS = 200


class AutoWatch:
    """Watches whatever trains on the calling thread, with one detector for all of it.

    Args:
        make: Makes the detector for the first model found.
    """

    def __init__(self, make: Callable[[torch.nn.Module], NaNDetector]) -> None:
        self._make = make
        self.detector: NaNDetector | None = None
        self._thread = threading.get_ident()
        self._depth = 0
        self._watched: set[int] = set()
        self._quiet_calls = 0
        self._handles: list[Any] = []

    def __enter__(self) -> AutoWatch:
        if switched_off():
            return self
        module = torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stop_searching()
        if self.detector is not None:
            self.detector.__exit__(kind, error, trace)

    def _stop_searching(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _elsewhere(self) -> bool:
        return torch.compiler.is_compiling() or is_replaying() or threading.get_ident() != self._thread

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if self._elsewhere():
            return
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        if id(module) in self._watched:
            self._quiet_calls += 1
            if self._quiet_calls > SETTLED_CALLS:
                self._stop_searching()
            return
        self._watched.add(id(module))
        if not any(p.requires_grad for p in module.parameters()):
            return
        self._quiet_calls = 0
        keywords = _keywords_of_call()
        try:
            self._watch(module, args, keywords)
        except NonFiniteError:
            raise
        except Exception:
            if strict():
                raise
            logger.exception(BUG)
            self._stop_searching()

    def _watch(self, module: torch.nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if self.detector is None:
            self.detector = self._make(module)
            self.detector.attach()
        else:
            self.detector._add_model(module)
        # This very call began before the module was hooked.
        self.detector.enter_call(module, args, keywords)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._elsewhere():
            self._depth = max(0, self._depth - 1)


def _keywords_of_call() -> dict[str, Any]:
    """Keyword arguments of the module call whose global pre-hook is running: torch does not hand them to it."""
    frame: Any = sys._getframe(2)
    found = frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}
