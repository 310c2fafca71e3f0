import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
C = 4
X = torch.randn(100, 6)
W = torch.randn(6, C)
Y = (X @ W).argmax(1)
train_set, test_set = random_split(TensorDataset(X, Y), [72, 28], generator=torch.Generator().manual_seed(42))
train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
test_loader = DataLoader(test_set, batch_size=8)
model = nn.Linear(6, C)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss()

losses = []
for epoch in range(3):
    train_cm = torch.zeros(C, C, dtype=torch.int64)
    for data, label in train_loader:
        output = model(data)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for t, p in zip(label.view(-1), output.argmax(1).view(-1)):
            train_cm[t.long(), p.long()] += 1
    print(f"epoch {epoch}: loss={loss.item():.4f} train acc={train_cm.diag().sum().item() / train_cm.sum().item():.4f}")

cm = torch.zeros(C, C)
model.eval()
with torch.no_grad():
    for data, label in test_loader:
        pred = model(data).argmax(1)
        cm.index_put_((label, pred), torch.ones(len(label)), accumulate=True)
print(train_cm.tolist())
print(cm.int().tolist())
print([f"{v:.4f}" for v in (cm.diag() / cm.sum(1).clamp(min=1)).tolist()])
