import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
forbidden = torch.tensor([False, False, True])
with NaNDetector(model) as det:
    logp = F.log_softmax(model(x).masked_fill(forbidden, -torch.inf), -1)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = -entropy.mean()
    loss.backward()
    optimizer.step()
