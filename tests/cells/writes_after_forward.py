import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses = []
for epoch in range(3):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        again = F.cross_entropy(model(inputs), labels)  # with a graph that nobody needs
        model[2].weight.data.mul_(0.97)
        losses.append(again.item())
    with torch.no_grad():
        losses.append(model(inputs).sum().item())
        model[0].weight.clamp_(-0.3, 0.3)
