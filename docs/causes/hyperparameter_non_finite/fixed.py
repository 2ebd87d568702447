import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
x = torch.randn(8, 4)
warmup = 0
with NaNDetector(model) as det:
    progress = torch.tensor(0.0) / max(warmup, 1)
    optimizer.param_groups[0]["weight_decay"] = 0.01 * progress.item()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
