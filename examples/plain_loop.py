"""The detector in a plain training loop, always on.

The model standardises each sample by hand. One sample of one batch is blank: its standard deviation is 0, and 0 / 0
is NaN. The detector says so before the optimizer takes the step, and the weights stay as they were.

    python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nan_detector import NaNDetector


class Standardise(nn.Module):
    """Shifts and scales each sample to mean 0 and standard deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Standardise `x`, shape (batch, features)."""
        centred = x - x.mean(dim=1, keepdim=True)
        return centred / x.std(dim=1, keepdim=True)


def make_loader(batches: int = 20, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Random batches, one of them with a blank sample."""
    loader = [(torch.rand(size, 16), torch.randint(0, 4, (size,))) for _ in range(batches)]
    loader[12][0][7] = 0.0
    return loader


def main() -> None:
    """Train, and stop at the first bad step."""
    torch.manual_seed(0)
    model = nn.Sequential(Standardise(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = make_loader()

    with NaNDetector(model) as det:
        for batch_idx, (x, y) in enumerate(loader):
            det.set_batch(batch_idx)  # optional: steps are counted without it
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            det.check_grad_norms()  # optional: runs by itself before optimizer.step()
            optimizer.step()
            if det.triggered:
                break  # the report is on standard error by now; det.event has it as a record


if __name__ == "__main__":
    main()
