import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.rand(8)
with NaNDetector(model) as det:
    image = model(x).squeeze(-1)
    loss = (image ** (1 / 2.2) - y).abs().mean()  # gamma correction
    loss.backward()
    optimizer.step()
