import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
anchor = torch.randn(8, 4)
positive = anchor.clone()  # the same images
with NaNDetector(model) as det:
    distance = (model(anchor) - model(positive)).square().sum(-1).sqrt()
    loss = distance.mean()
    loss.backward()
    optimizer.step()
