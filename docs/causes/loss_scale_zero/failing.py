import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.rand(8, 1)
scale = torch.tensor(65536.0) / 2.0**200  # halved by 200 steps, all NaN
with NaNDetector(model) as det:
    loss = (model(x) - y).square().mean()
    (loss * scale).backward()
    inv_scale = 1 / scale
    for p in model.parameters():
        p.grad *= inv_scale
    optimizer.step()
