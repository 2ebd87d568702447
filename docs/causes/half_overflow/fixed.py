import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 8).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = (300 * torch.randn(8, 4)).half()
with NaNDetector(model) as det:
    loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
