import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    density = 10 + model(x).square()  # of 100 observations
    loss = -density.prod(-1).mean()
    loss.backward()
    optimizer.step()
