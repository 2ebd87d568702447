import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.full((8,), -100)  # every label is ignored
with NaNDetector(model) as det:
    total = F.cross_entropy(model(x), y, reduction="sum")
    loss = total / (y != -100).sum().clamp_min(1)
    loss.backward()
    optimizer.step()
