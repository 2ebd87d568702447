import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    total = torch.zeros(8)
    for i in range(1, 8):
        total[i] = model(x[:i]).mean()
    loss = total.square().mean()
    loss.backward()
    optimizer.step()
