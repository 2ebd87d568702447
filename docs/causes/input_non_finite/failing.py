import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.rand(8)
x[:, 2] = 7  # a constant column
x = (x - x.mean(0)) / x.std(0)
with NaNDetector(model) as det:
    loss = F.mse_loss(model(x).squeeze(-1), y)
    loss.backward()
    optimizer.step()
