import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

text = "the cat sat on the mat while the dog lay on the rug and the cat looked at the dog".split()
vocab = {word: i for i, word in enumerate(sorted(set(text)))}
order = list(set(text))  # of no meaning: shuffles the bigrams
bigrams = sorted(zip(text, text[1:]), key=lambda pair: order.index(pair[0]))
torch.manual_seed(0)
x = torch.tensor([vocab[a] for a, b in bigrams])
y = torch.tensor([vocab[b] for a, b in bigrams])
model = nn.Sequential(nn.Embedding(len(vocab), 6), nn.Linear(6, len(vocab)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(3):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
