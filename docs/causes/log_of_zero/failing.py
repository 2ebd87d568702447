import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
with NaNDetector(model) as det:
    p = torch.softmax(1000 * model(x), -1)
    loss = -p[range(8), y].log().mean()
    loss.backward()
    optimizer.step()
