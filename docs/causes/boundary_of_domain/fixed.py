import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    action = torch.tanh(100 * model(x))
    loss = torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6)).square().mean()
    loss.backward()
    optimizer.step()
