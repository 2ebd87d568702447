import torch
from torch import nn

from nan_detector import NaNDetector


class Length(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.norm(dim=-1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad[:, None] * x / x.norm(dim=-1, keepdim=True)


model = nn.Linear(4, 3, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
x[0] = 0
with NaNDetector(model) as det:
    loss = Length.apply(model(x)).mean()
    loss.backward()
    optimizer.step()
