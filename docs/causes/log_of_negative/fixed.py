import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 2)  # mean and variance
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 4), torch.randn(32)
with NaNDetector(model) as det:
    mean, var = model(x).unbind(-1)
    var = F.softplus(var) + 1e-6
    loss = (var.log() + (y - mean) ** 2 / var).mean()
    loss.backward()
    optimizer.step()
