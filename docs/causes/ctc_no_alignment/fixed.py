import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
frames, target = torch.randn(3, 1, 4), torch.tensor([[1, 2, 3, 4]])
lengths = torch.tensor([3]), torch.tensor([4])  # three frames, four symbols
with NaNDetector(model) as det:
    loss = F.ctc_loss(model(frames).log_softmax(-1), target, *lengths, zero_infinity=True)
    loss.backward()
    optimizer.step()
