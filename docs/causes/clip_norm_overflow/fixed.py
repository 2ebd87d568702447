import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    loss = (1e20 * model(x)).mean()
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    optimizer.step()
