import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(1, 4)  # the last batch has one sample
with NaNDetector(model) as det:
    value = model(x).squeeze(-1)
    loss = ((value - value.mean()) / (value.std() + 1e-6)).sum()
    loss.backward()
    optimizer.step()
