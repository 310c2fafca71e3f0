import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = x.view(x.size(0), 1, 8, 8)
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(2).mean(-1))


class GPT(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.wte = nn.Embedding(16, 12)
        self.wpe = nn.Embedding(8, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True, norm_first=True, bias=False) for _ in range(2)
        )
        self.ln = nn.LayerNorm(12)
        self.head = nn.Linear(12, 16, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(self.ln(x)).transpose(1, 2)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5)) for _ in range(3))
        self.never = nn.Linear(7, 7)

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = 0
        for i, expert in enumerate(self.experts):
            out = out + (weight * (choice == i)).unsqueeze(-1) * expert(x)
        return out


models = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5)),
    "conv": ConvNet,
    "gpt": lambda: GPT(tied=False),
    "gpt_tied": lambda: GPT(tied=True),
    "mixture": Mixture,
}
optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-4, amsgrad=True),
}

torch.manual_seed(0)
pictures = TensorDataset(torch.randn(32, 64), torch.randint(0, 5, (32,)))
tokens = torch.randint(0, 16, (32, 9))
texts = TensorDataset(tokens[:, :-1], tokens[:, 1:])

losses, trained, states = [], {}, {}
for model_name in models:
    for optimizer_name in optimizers:
        torch.manual_seed(1)
        model = models[model_name]()
        optimizer = optimizers[optimizer_name](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        loader = DataLoader(texts if "gpt" in model_name else pictures, batch_size=8, shuffle=True)
        curve = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            curve.append(loss.item())
        trained[model_name, optimizer_name] = model.eval()
        states[model_name, optimizer_name] = optimizer
        losses += curve
        print(f"{model_name:10s} {optimizer_name:10s} {curve[0]:.4f} -> {curve[-1]:.4f}")
