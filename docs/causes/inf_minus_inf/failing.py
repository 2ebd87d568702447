import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, padding = torch.randn(8, 4), torch.arange(8)[:, None] == 7  # the last row is padding
with NaNDetector(model) as det:
    scores = model(x).masked_fill(padding, -torch.inf)
    scores = scores - scores.amax(-1, keepdim=True)
    loss = scores.exp().sum(-1).mean()
    loss.backward()
    optimizer.step()
