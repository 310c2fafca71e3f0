import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, 2, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        h, hidden = self.rnn(x, hidden)
        return self.out(h[:, -1]), hidden


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
loader = DataLoader(TensorDataset(torch.randn(50, 5, 3), torch.randint(2, (50,))), batch_size=7, shuffle=True)
losses = []
for epoch in range(2):
    hidden = None
    for x, y in loader:
        if hidden is not None:
            hidden = hidden[:, : len(x)].detach().contiguous()  # the last batch has a single sample
        output, hidden = model(x, hidden)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
