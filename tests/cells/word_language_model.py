import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
words, bptt, batch_size = 20, 8, 5


class RNNModel(nn.Module):
    def __init__(self, hidden=8, layers=2):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(words, hidden), nn.LSTM(hidden, hidden, layers)
        self.decoder = nn.Linear(hidden, words)
        self.decoder.weight = self.encoder.weight
        self.hidden, self.layers = hidden, layers

    def forward(self, text, hidden):  # time, batch
        output, hidden = self.rnn(self.encoder(text), hidden)
        return F.log_softmax(self.decoder(output).view(-1, words), dim=1), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(self.layers, batch, self.hidden) for _ in range(2))


def repackage(hidden):
    return hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(repackage(one) for one in hidden)


data = torch.randint(words, (batch_size * 41,)).view(batch_size, -1).t().contiguous()
model = RNNModel()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
losses = []
for epoch in range(2):
    hidden = model.init_hidden(batch_size)
    for i in range(0, len(data) - 1, bptt):
        length = min(bptt, len(data) - 1 - i)  # of the last one: fewer
        text, target = data[i : i + length], data[i + 1 : i + 1 + length].view(-1)
        optimizer.zero_grad()
        output, hidden = model(text, repackage(hidden))
        loss = F.nll_loss(output, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
