import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
sequences = [(torch.randn(int(n), 3), int(n) % 2) for n in torch.randint(2, 9, (26,))]


def collate(batch):
    xs, ys = zip(*batch)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)


class Attention(nn.Module):
    """Two recurrent layers, the first with a norm between; its states begin with what the first element gives."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.GRU(3, 6, batch_first=True, bidirectional=True), nn.LayerNorm(12)
        self.second, self.start = nn.LSTM(12, 5), nn.Linear(3, 5)
        self.begin = nn.Parameter(torch.randn(1, 1, 5))
        self.score, self.out = nn.Linear(5, 1), nn.Linear(5, 2)

    def forward(self, x, lengths):
        packed, _ = self.first(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        packed = PackedSequence(
            self.norm(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        states = self.begin.expand(1, len(x), 5).contiguous(), self.start(x[:, 0]).unsqueeze(0)
        packed, _ = self.second(packed, states)
        y, lengths = pad_packed_sequence(packed)  # time in front
        beyond = torch.arange(y.size(0))[:, None] >= lengths
        weights = self.score(y).squeeze(-1).masked_fill(beyond, float("-inf")).softmax(0)
        return self.out((weights.unsqueeze(-1) * y).sum(0)), weights.t()


model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses, shapes = [], []
for epoch in range(2):
    for x, lengths, y in DataLoader(sequences, batch_size=7, shuffle=True, collate_fn=collate):
        logits, weights = model(x, lengths)
        loss = F.cross_entropy(logits, y) - 0.01 * (weights * (weights + 1e-9).log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        shapes.append(tuple(weights.shape))  # as long as the longest of the whole batch
    print(shapes)
