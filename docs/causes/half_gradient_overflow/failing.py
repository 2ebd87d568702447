import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4).half()
with NaNDetector(model) as det:
    loss = model(x).float().square().mean()
    (loss * 2**24).backward()  # a loss scale
    for p in model.parameters():
        p.grad /= 2**24
    optimizer.step()
