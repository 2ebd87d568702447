import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(256, 4)
with NaNDetector(model) as det:
    a = model(x)
    cos = (a * a).sum(-1) / a.norm(dim=-1) ** 2
    loss = torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6)).mean()
    loss.backward()
    optimizer.step()
