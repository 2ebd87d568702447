"""`detect_nan`: every operation checked, for code that can be run again. No model, no optimizer needed."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from nan_detector._errors import NonFiniteError
from nan_detector._gate import Suspicion
from nan_detector._hit import Finding, complete, new_event
from nan_detector._lineage import Line, key_of
from nan_detector._live import Live
from nan_detector._origin import trace_live
from nan_detector._records import NaNEvent
from nan_detector._state import switched_off
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
