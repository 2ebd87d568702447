import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 2)  # mean and logarithm of the variance
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = 1000 * torch.randn(64, 4)
with NaNDetector(model) as det:
    mean, logvar = model(x).unbind(-1)
    logvar = logvar.clamp(-20, 20)
    loss = (mean**2 + logvar.exp() - logvar - 1).mean() / 2
    loss.backward()
    optimizer.step()
