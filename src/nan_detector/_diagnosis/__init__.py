"""Why a NaN or Inf was born: small pure rules over the plain data of a trace. Nothing here loads torch."""

from nan_detector._diagnosis.engine import diagnose

__all__ = ["diagnose"]
