import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
with NaNDetector(model) as det:
    logp = F.log_softmax(1000 * model(x), -1)
    loss = -logp[range(8), y].mean()
    loss.backward()
    optimizer.step()
