import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses, norms = [], []
for epoch in range(3):
    if epoch == 2:
        model[2].reset_parameters()  # the head begins anew
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        again = F.cross_entropy(model(inputs), labels)  # with a graph that nobody needs
        norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999).add_(1e-3 * torch.randn_like(p))
        losses.append(again.item())
