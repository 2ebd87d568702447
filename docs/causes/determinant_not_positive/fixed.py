import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(3, 3)  # an invertible layer of a flow
with torch.no_grad():
    model.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, -1.0])))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)
with NaNDetector(model) as det:
    loss = model(x).square().mean() - torch.linalg.slogdet(model.weight).logabsdet
    loss.backward()
    optimizer.step()
