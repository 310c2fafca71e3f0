import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class LanguageModel(nn.Module):
    def __init__(self, batch_first, words=11, width=8):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(words, width), nn.GRU(width, width, batch_first=batch_first)
        self.out = nn.Linear(width, words)

    def forward(self, text, hidden):
        output, hidden = self.rnn(self.embed(text), hidden)
        return self.out(output).view(-1, self.out.out_features), hidden


losses, lasts = [], []
for batch_first in (True, False):
    model, hidden = LanguageModel(batch_first), torch.zeros(1, 6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for length in (1, 8, 3, 1, 6):  # one word shows no order
        text = torch.randint(11, (6, length) if batch_first else (length, 6))
        output, hidden = model(text, hidden.detach())
        loss = F.cross_entropy(output, torch.randint(11, (6 * length,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        lasts.append(output[-1].tolist())
