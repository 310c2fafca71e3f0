import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
embedding = nn.Embedding(40, 6, sparse=True)
head = nn.Linear(6, 2)
opt_sparse = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.05)
opt_dense = torch.optim.SGD(head.parameters(), lr=0.2)
losses = []
for w, y in DataLoader(TensorDataset(torch.randint(0, 40, (48,)), torch.randint(0, 2, (48,))), batch_size=12):
    loss = nn.functional.cross_entropy(head(embedding(w)), y)
    opt_sparse.zero_grad()
    opt_dense.zero_grad()
    loss.backward()
    opt_sparse.step()
    opt_dense.step()
    losses.append(loss.item())
model = head
