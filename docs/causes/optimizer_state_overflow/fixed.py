import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(8, 4)
with NaNDetector(model, protect="full") as det:
    loss = (1e22 * model(x)).mean()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
