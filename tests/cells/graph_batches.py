import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)


def random_graph():
    n = int(torch.randint(3, 7, (1,)))
    edges = torch.randint(0, n, (2, 2 * n))
    return {"x": torch.randn(n, 4), "edge_index": edges, "y": int(edges.size(1) > 9)}


def collate_graphs(graphs):
    xs, edges, batch, offset = [], [], [], 0
    for i, g in enumerate(graphs):
        xs.append(g["x"])
        edges.append(g["edge_index"] + offset)
        batch.append(torch.full((len(g["x"]),), i))
        offset += len(g["x"])
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor([g["y"] for g in graphs])


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def propagate(self, h, edge_index):
        src, dst = edge_index
        return torch.zeros_like(h).index_add(0, dst, h[src])

    def forward(self, x, edge_index, batch):
        h = F.relu(self.propagate(self.lin1(x), edge_index))
        h = F.relu(self.propagate(self.lin2(h), edge_index))
        pooled = torch.zeros(int(batch.max()) + 1, h.size(1)).index_add(0, batch, h)
        return self.out(pooled)


model = GNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
losses = []
graphs = [random_graph() for _ in range(24)]
for x, edge_index, batch, y in DataLoader(graphs, batch_size=8, shuffle=True, collate_fn=collate_graphs):
    loss = F.cross_entropy(model(x, edge_index, batch), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
