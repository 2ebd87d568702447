import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
grad = torch.ones(8, 3)
grad[0, 0] = torch.nan  # from a simulator
with NaNDetector(model) as det:
    model(x).backward(gradient=torch.nan_to_num(grad))
    optimizer.step()
