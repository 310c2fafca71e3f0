import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Transfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


model = Transfer()
for param in model.backbone.parameters():
    param.requires_grad = False
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.3, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,))), batch_size=8, shuffle=True)
losses = []
for epoch in range(2):
    if epoch == 1:
        for param in model.backbone.parameters():
            param.requires_grad = True
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 0.03})
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
