import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
with NaNDetector(model) as det:
    h = model(x) + 5000
    var = h.var(-1, correction=0)
    loss = (h.mean(-1) / (var + 1e-6).sqrt()).mean()
    loss.backward()
    optimizer.step()
