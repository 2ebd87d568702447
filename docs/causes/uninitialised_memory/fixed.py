import torch
from torch import nn

from nan_detector import NaNDetector

torch.use_deterministic_algorithms(True)  # fills what nobody wrote with NaN


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        out = torch.zeros(8, 4)
        out[:, :3] = self.linear(x)[:, :3]
        return out


model = Scale()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector(model) as det:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
