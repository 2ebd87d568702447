"""Every operation checked: for code that is known to go wrong and can be run again.

No model is handed over and no optimizer needed; it works under no_grad too. The exception carries the report, and its
traceback ends at the guilty line.

    python examples/detect_nan.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nan_detector


def distances(points: Tensor) -> Tensor:
    """Distance of each point from each other one, shape (n, n), of `points`, shape (n, d)."""
    between = points[:, None] - points[None, :]
    return torch.sqrt((between**2).sum(-1))  # 0 on the diagonal, where the square root has no finite gradient


def main() -> None:
    """Run the code that goes wrong, with every operation checked."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    x = torch.randn(16, 8)

    try:
        with nan_detector.detect_nan():
            loss = distances(model(x)).mean()
            loss.backward()
    except nan_detector.NonFiniteError as error:
        print(error.event)


if __name__ == "__main__":
    main()
