import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(42)
y_train = (torch.rand(50) < 0.15).long()
x_train = torch.randn(50, 5) - y_train[:, None].float()
class_count = torch.bincount(y_train)
weights = (1.0 / class_count)[y_train]
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
train_loader = DataLoader(TensorDataset(x_train, y_train.float()), batch_size=10, sampler=sampler)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(2):
    for x_batch, y_batch in train_loader:
        optimizer.zero_grad()
        y_pred = model(x_batch)
        loss = criterion(y_pred, y_batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
