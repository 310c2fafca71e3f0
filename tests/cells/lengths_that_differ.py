import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TokenLosses(nn.Module):
    def __init__(self, words=11, width=8):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, tokens):  # one loss a token, of all samples one after the other
        logits = self.out(self.rnn(self.embed(tokens[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


model = TokenLosses()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for length in (5, 9, 3, 7):
    each = model(torch.randint(11, (6, length)))
    loss = each.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses += [loss.item(), len(each)]
