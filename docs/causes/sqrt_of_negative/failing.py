import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
with NaNDetector(model) as det:
    h = model(x) + 5000
    var = (h * h).mean(-1) - h.mean(-1) ** 2
    loss = (h.mean(-1) / var.sqrt()).mean()
    loss.backward()
    optimizer.step()
