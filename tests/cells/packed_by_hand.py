import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
sequences = [torch.randint(1, 12, (int(n),)) for n in torch.randint(2, 9, (30,))]


class Tagger(nn.Module):
    """Sorted, and sorted back, as before ``enforce_sorted=False``."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(12, 6, padding_idx=0), nn.LSTM(6, 8, batch_first=True)
        self.tags, self.kind = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, words):
        lengths = (words > 0).sum(1).cpu()
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(words)[order], lengths, batch_first=True)
        output, (hidden, _) = self.rnn(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=words.size(1))
        _, back = order.sort()
        return self.tags(output.index_select(0, back)), self.kind(hidden[-1][back])


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for epoch in range(2):
    for words in DataLoader(sequences, 8, shuffle=True, collate_fn=lambda them: pad_sequence(them, batch_first=True)):
        tags, kinds = model(words)
        targets = (words % 4).masked_fill(words == 0, -100)
        loss = F.cross_entropy(tags.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss = loss + F.cross_entropy(kinds, words.sum(1) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
