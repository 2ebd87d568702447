import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    s = 1 + torch.relu(model(x) - 10)
    loss = torch.special.zeta(s.detach(), 2 * torch.ones(1)).mean() + s.mean()
    loss.backward()
    optimizer.step()
