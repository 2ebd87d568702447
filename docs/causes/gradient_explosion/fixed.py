import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    h = x
    for layer in range(60):
        h = torch.sin(model(h.detach() if layer % 10 == 0 else h))
    loss = h.square().mean()
    loss.backward()
    optimizer.step()
