import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
sequences = [(torch.randn(int(n), 3), int(n) % 2) for n in torch.randint(2, 9, (24,))]


def collate_fn(batch):
    xs, ys = zip(*batch)
    return {
        "inputs": pad_sequence(list(xs), batch_first=True),
        "lengths": torch.tensor([len(x) for x in xs]),
        "labels": torch.tensor(ys),
    }


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, inputs, lengths):
        packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, (h, c) = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        return self.fc(torch.cat([h[-2], h[-1]], dim=1)), output


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses = []
for epoch in range(2):
    for batch in DataLoader(sequences, batch_size=8, shuffle=True, collate_fn=collate_fn):
        logits, _ = model(batch["inputs"], batch["lengths"])
        loss = nn.functional.cross_entropy(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
