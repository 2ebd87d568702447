import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1).half()
optimizer = torch.optim.SGD(model.parameters(), lr=50)
x = (5 * torch.rand(8, 4)).half()
with NaNDetector(model) as det:
    for step in range(20):
        optimizer.zero_grad()
        loss = -model(x).mean()
        loss.backward()
        optimizer.step()
