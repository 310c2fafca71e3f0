import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.save_features = False

    def forward(self, x):
        hidden = F.relu(self.encoder(x))
        if self.save_features:
            self.features = hidden.detach()
        return self.head(hidden)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,))), batch_size=16, shuffle=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, centers = [], []
for epoch in range(2):
    model.save_features = epoch == 1
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if model.save_features:
            centers.append(model.features.mean().item())
