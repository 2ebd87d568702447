import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(2, (8,))
unseen = torch.tensor([False, False, True])
with NaNDetector(model) as det:
    logits = model(x).masked_fill(unseen, -torch.inf)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
