
import random, numpy as np, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
def set_seed(s): random.seed(s); np.random.seed(s); torch.manual_seed(s)
set_seed(42)
X, Y = torch.randn(60, 6), torch.randint(0, 3, (60,))
loader = DataLoader(TensorDataset(X, Y), batch_size=15, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for epoch in range(2):
    for x, y in loader:
        if random.random() < 0.5: x = x + 0.1 * torch.randn_like(x)
        loss = criterion(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
