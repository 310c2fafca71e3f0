import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = x.mean(dim=(2, 3))
        return self.fc(x)


def train_one_epoch(model, loader, optimizer, criterion):
    model.train()
    history = []
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = 0
    for data, target in loader:
        pred = model(data.to(device)).argmax(dim=1, keepdim=True)
        correct += pred.eq(target.to(device).view_as(pred)).sum().item()
    return correct / len(loader.dataset)


images = torch.randn(48, 1, 10, 10)
digits = torch.randint(0, 4, (48,))
train_set, val_set = random_split(TensorDataset(images, digits), [32, 16])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
val_loader = DataLoader(val_set, batch_size=16)

model = Net().to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
losses = []
for epoch in range(2):
    losses += train_one_epoch(model, train_loader, optimizer, nn.CrossEntropyLoss())
    accuracy = evaluate(model, val_loader)
    print(f"epoch {epoch}: val accuracy {accuracy:.2%}")
