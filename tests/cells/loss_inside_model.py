import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class Output(dict):
    def __getattr__(self, name):
        return self[name]


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        mask = attention_mask.unsqueeze(-1).float()
        pooled = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.classifier(pooled)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return Output(loss=loss, logits=logits)


torch.manual_seed(0)
rows = []
for _ in range(40):
    n = int(torch.randint(3, 10, (1,)))
    ids = torch.zeros(10, dtype=torch.long)
    ids[:n] = torch.randint(1, 30, (n,))
    rows.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(n % 3)})

model = SequenceClassifier()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
dataloader = DataLoader(rows, batch_size=8, shuffle=True)
losses = []
for step, batch in enumerate(dataloader):
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(outputs.loss.item())
