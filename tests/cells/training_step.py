import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch):
        x, y = batch
        out = self.net(x)
        return {"val_loss": F.cross_entropy(out, y).detach(), "val_acc": (out.argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    outputs = [model.validation_step(b) for b in loader]
    return {k: torch.stack([o[k] for o in outputs]).mean().item() for k in outputs[0]}


def fit(epochs, model, train_loader, val_loader):
    optimizer = model.configure_optimizers()
    history, losses = [], []
    for epoch in range(epochs):
        model.train()
        for batch in train_loader:
            loss = model.training_step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        result = evaluate(model, val_loader)
        print("Epoch [{}], val_loss: {:.4f}, val_acc: {:.4f}".format(epoch, result["val_loss"], result["val_acc"]))
        history.append(result)
    return history, losses


torch.manual_seed(0)
train_ds = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))
val_ds = TensorDataset(torch.randn(16, 5), torch.randint(0, 2, (16,)))
model = LitModel()
history, losses = fit(2, model, DataLoader(train_ds, 10, shuffle=True), DataLoader(val_ds, 8))
