import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, lowest = torch.randn(8, 4), torch.finfo(torch.float32).min
causal, padding = torch.full((8, 3), lowest), torch.full((8, 3), lowest)
with NaNDetector(model) as det:
    scores = model(x).masked_fill((causal < 0) | (padding < 0), lowest)
    loss = scores.softmax(-1).square().mean()
    loss.backward()
    optimizer.step()
