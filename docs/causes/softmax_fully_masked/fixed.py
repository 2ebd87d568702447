import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, padding = torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.bool)
padding[1] = True  # an empty sequence
with NaNDetector(model) as det:
    h = model(x)
    scores = (h @ h.mT).masked_fill(padding[:, None], -1e4)
    loss = (scores.softmax(-1) @ h).square().mean()
    loss.backward()
    optimizer.step()
