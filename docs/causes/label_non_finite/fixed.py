import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.rand(8)
y[3] = torch.nan  # not measured
with NaNDetector(model) as det:
    known = y.isfinite()
    loss = F.mse_loss(model(x).squeeze(-1)[known], y[known])
    loss.backward()
    optimizer.step()
