import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 8).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4).half()
with NaNDetector(model) as det:
    h = torch.relu(model(x) - 10).float()
    loss = (h / (h.norm(dim=-1, keepdim=True) + 1e-8)).sum()
    loss.backward()
    optimizer.step()
