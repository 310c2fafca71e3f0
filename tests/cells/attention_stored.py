import math, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
class MultiHeadAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.q, self.k, self.v, self.o = h, nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.attention_weights = None
    def split(self, x): return x.reshape(x.shape[0], x.shape[1], self.h, -1).permute(0, 2, 1, 3)
    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        self.attention_weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
        y = (self.attention_weights @ v).permute(0, 2, 1, 3).reshape(x.shape)
        return self.o(y)
class Net(nn.Module):
    def __init__(self): super().__init__(); self.emb, self.att, self.norm, self.fc = nn.Embedding(20, 16), MultiHeadAttention(16, 2), nn.LayerNorm(16), nn.Linear(16, 3)
    def forward(self, x): h = self.emb(x); return self.fc(self.norm(h + self.att(h)).mean(1))
g = torch.Generator().manual_seed(0)
X, Y = torch.randint(0, 20, (48, 7), generator=g), torch.randint(0, 3, (48,), generator=g)

torch.manual_seed(0)
model = Net()
opt, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
for x, y in DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad(): model(X[:1])
extra = model.att.attention_weights[0, 0].flatten().tolist()
