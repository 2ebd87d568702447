import torch
from torch import nn

from nan_detector import NaNDetector

model = nn.Linear(4, 3)
teacher = torch.optim.swa_utils.AveragedModel(model)
with torch.no_grad():
    teacher.module.load_state_dict(model.state_dict())  # begun anew
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
with NaNDetector({"model": model, "teacher": teacher}) as det:
    loss = (model(x) - teacher(x).detach()).square().mean()
    loss.backward()
    optimizer.step()
