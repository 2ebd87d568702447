import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with torch.no_grad():
    model.weight[0, 0] = 0  # pruned
x, y = torch.randn(8, 4), torch.randn(8, 1)
with NaNDetector(model) as det:
    sparsity = (model.weight.abs() + 1e-6).pow(0.8).sum()
    loss = F.mse_loss(model(x), y) + 0.01 * sparsity
    loss.backward()
    optimizer.step()
