import torch
import torch.nn as nn

torch.manual_seed(0)


class CharLM(nn.Module):
    def __init__(self, vocab=12, hidden=8, layers=2):
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.emb = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, vocab)

    def init_hidden(self, batch_size):
        return (
            torch.zeros(self.layers, batch_size, self.hidden),
            torch.zeros(self.layers, batch_size, self.hidden),
        )

    def forward(self, x, state):
        out, state = self.lstm(self.emb(x), state)
        return self.fc(out), state


text = torch.randint(0, 12, (4 * 31,)).view(4, 31)
model = CharLM()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = model.init_hidden(4)
losses = []
for i in range(0, 30, 6):
    inputs, targets = text[:, i : i + 6], text[:, i + 1 : i + 7]
    state = tuple(s.detach() for s in state)
    logits, state = model(inputs, state)
    loss = criterion(logits.reshape(-1, 12), targets.reshape(-1))
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
