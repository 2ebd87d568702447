import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 4)).mean().backward()
optimizer.step()
checkpoint = optimizer.state_dict()
checkpoint["state"][0]["exp_avg"][:] = torch.nan  # saved after a bad step
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    optimizer.state.clear()  # the moments begin anew
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
