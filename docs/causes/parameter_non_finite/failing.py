import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
counts = torch.tensor([50.0, 30.0, 0.0])  # of each class; the last does not occur
with torch.no_grad():
    model.bias.copy_((counts / counts.sum()).log())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
with NaNDetector(model) as det:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
