import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, edges = torch.randn(5, 4), torch.ones(5, 5)
edges[2] = 0  # a node without neighbours
with NaNDetector(model) as det:
    scale = edges.sum(-1).pow(-0.5)
    h = scale[:, None] * (edges @ model(x))
    loss = h.square().mean()
    loss.backward()
    optimizer.step()
