import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,))), batch_size=8, shuffle=True)


def train(model, optimizer, epochs=1):
    history = []
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return history


model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
losses = train(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4))
# fine-tune with a smaller learning rate
losses += train(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), epochs=2)
