import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, eps=1e-3)
criterion = nn.NLLLoss()
loader = DataLoader(TensorDataset(torch.rand(40, 1, 4, 4), torch.randint(0, 3, (40,))), batch_size=10, shuffle=True)
losses = []
for epoch in range(2):
    pbar = tqdm(loader, desc=f"Epoch {epoch}", leave=False)
    for data, target in pbar:
        optimizer.zero_grad()
        output = torch.log_softmax(model(data), dim=1)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        pbar.set_postfix(loss=f"{loss.item():.3f}")
