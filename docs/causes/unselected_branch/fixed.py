import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, count = torch.randn(8, 4), torch.arange(8.0)[:, None]  # of observations
with NaNDetector(model) as det:
    mean = torch.where(count > 0, model(x) / count.clamp_min(1), 0.0)
    loss = mean.square().mean()
    loss.backward()
    optimizer.step()
