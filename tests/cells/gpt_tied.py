import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        self.chars = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([self.stoi[c] for c in text])
        self.block_size = block_size

    def __len__(self):
        return (len(self.ids) - 1) // self.block_size

    def __getitem__(self, i):
        chunk = self.ids[i * self.block_size : (i + 1) * self.block_size + 1]
        return chunk[:-1], chunk[1:]


class LanguageModel(nn.Module):
    def __init__(self, vocab, d=16, block_size=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(1, block_size, d))
        layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight  # tie
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, x, targets=None):
        T = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        logits = self.head(self.encoder(self.tok(x) + self.pos[:, :T], mask=mask, is_causal=True))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
dataset = CharDataset("to be or not to be that is the question whether tis nobler in the mind to suffer " * 3, 12)
model = LanguageModel(len(dataset.chars))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(dataset, batch_size=4, shuffle=True):
    logits, loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
