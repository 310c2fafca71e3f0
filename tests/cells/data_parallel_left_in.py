import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 6, generator=g), torch.randint(0, 3, (60,), generator=g)

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
if torch.cuda.device_count() >= 0:
    model = nn.DataParallel(model)
model.to(device)
opt, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for x, y in DataLoader(TensorDataset(X, Y), batch_size=15, shuffle=True, pin_memory=torch.cuda.is_available()):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
extra = model.module[0].weight[0].tolist()
