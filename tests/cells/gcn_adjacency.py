import torch, torch.nn as nn, torch.nn.functional as F
class GraphConvolution(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(i, o).uniform_(-0.3, 0.3)), nn.Parameter(torch.zeros(o))
    def forward(self, x, adj): return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias
class GCN(nn.Module):
    def __init__(self, f, h, c):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(f, h), GraphConvolution(h, c)
    def forward(self, x, adj): return F.log_softmax(self.gc2(F.relu(self.gc1(x, adj)), adj), dim=1)
g = torch.Generator().manual_seed(2)
n = 40
a = (torch.rand(n, n, generator=g) < 0.1).float(); a = ((a + a.t()) > 0).float() + torch.eye(n)
adj = (a / a.sum(1, keepdim=True)).to_sparse()
features, labels = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
idx_train, idx_val = torch.arange(0, 20), torch.arange(20, 30)

torch.manual_seed(0)
model = GCN(6, 8, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
losses, vals = [], []
for epoch in range(6):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    model.eval()
    vals.append(F.nll_loss(model(features, adj)[idx_val], labels[idx_val]).item())
    losses.append(loss.item())
extra = vals
