import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
texts = [(torch.randint(0, 50, (int(n),)), int(n) % 3) for n in torch.randint(2, 10, (32,))]


def collate_batch(batch):
    labels, flat, offsets = [], [], [0]
    for tokens, label in batch:
        labels.append(label)
        flat.append(tokens)
        offsets.append(len(tokens))
    return torch.tensor(labels), torch.cat(flat), torch.tensor(offsets[:-1]).cumsum(dim=0)


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


model = TextClassifier()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
losses = []
total_acc, total_count = 0, 0
for label, text, offsets in DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate_batch):
    optimizer.zero_grad()
    predicted_label = model(text, offsets)
    loss = criterion(predicted_label, label)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    total_acc += (predicted_label.argmax(1) == label).sum().item()
    total_count += label.size(0)
    losses.append(loss.item())
accuracy = total_acc / total_count
