import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.rand(8)
mask = torch.zeros(8)  # nothing to predict in this batch
with NaNDetector(model) as det:
    error = (model(x).squeeze(-1) - y).square()
    loss = (error * mask).sum() / mask.sum().clamp_min(1)
    loss.backward()
    optimizer.step()
