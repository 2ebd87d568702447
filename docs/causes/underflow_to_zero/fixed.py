import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, centres = 3 * torch.randn(64, 4), torch.randn(5, 2)
with NaNDetector(model) as det:
    d2 = (model(x)[:, None] - centres).square().sum(-1)
    weight = torch.softmax(-20 * d2, -1)
    loss = weight.square().mean()
    loss.backward()
    optimizer.step()
