import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, blocked = torch.randn(8, 4), torch.zeros(8, 3)
blocked[0] = -torch.inf  # no path leads to the first state
with NaNDetector(model) as det:
    alpha = torch.logsumexp(model(x) + blocked.clamp_min(-1e4), -1)
    loss = -alpha[1:].mean()
    loss.backward()
    optimizer.step()
