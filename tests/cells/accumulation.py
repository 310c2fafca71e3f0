import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(48, 5), torch.randint(0, 3, (48,))), batch_size=8, shuffle=True)
accum_steps = 2
losses = []
optimizer.zero_grad()
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / accum_steps
        loss.backward()
        losses.append(loss.item() * accum_steps)
        if (i + 1) % accum_steps == 0:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {i + 1} lr {scheduler.get_last_lr()[0]:.3f} grad norm {grad_norm:.4f}")
