import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
with torch.no_grad():
    model.bias[0] = -100  # a feature that is always 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randn(8, 1)
with NaNDetector(model) as det:
    h = torch.relu(model(x))
    inverse, _ = torch.linalg.inv_ex(h.T @ h + 1e-3 * torch.eye(3))
    loss = (h @ (inverse @ (h.T @ y)) - y).square().mean()
    loss.backward()
    optimizer.step()
