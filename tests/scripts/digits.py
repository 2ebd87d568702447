"""A classifier of small pictures, as such scripts are usually written: flags, loaders, two functions, a scheduler."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Noisy stripes, of which the network tells the direction; one picture may be blank."""

    def __init__(self, count, seed, blank=None):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        stripes = torch.arange(12) // 2 % 2
        kinds = [stripes.expand(12, 12), stripes.expand(12, 12).T, torch.eye(12), torch.eye(12).flip(0)]
        noise = torch.randn(count, 12, 12, generator=generator)
        self.pictures = torch.stack([kinds[k].float() for k in self.labels]) + 0.4 * noise
        if blank is not None:
            self.pictures[blank] = 0.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index][None], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        mean = x.mean((2, 3), keepdim=True)
        spread = x.std((2, 3), keepdim=True)
        x = (x - mean) / spread
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item()!r}")


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss!r}, Accuracy: {correct}/{len(test_loader.dataset)}\n")


def main():
    parser = argparse.ArgumentParser(description="Stripes")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--start-method", default="fork")
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--save-model", default="model.pt")
    parser.add_argument("--plant", type=int, default=None, help="number of the picture that is blank")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    loaders = {"num_workers": args.workers, "multiprocessing_context": args.start_method if args.workers else None}
    train_set, test_set = Pictures(128, seed=2, blank=args.plant), Pictures(64, seed=3)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, **loaders)
    test_loader = DataLoader(test_set, batch_size=32, **loaders)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
