import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((8, 4), torch.inf))  # a bad batch, long ago
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    model[1].reset_running_stats()
    model.eval()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
