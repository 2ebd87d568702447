import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(256, 4)
with NaNDetector(model) as det:
    a = model(x)
    cos = (a * a).sum(-1) / a.norm(dim=-1) ** 2  # 1, but for rounding
    loss = torch.acos(cos).mean()
    loss.backward()
    optimizer.step()
