import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(3, 3)
nn.init.eye_(model.weight)  # three equal singular values
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)
with NaNDetector(model) as det:
    s = torch.linalg.svdvals(model.weight)
    loss = model(x).square().mean() + s[:1].square().sum()
    loss.backward()
    optimizer.step()
