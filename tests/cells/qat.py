import torch, torch.nn as nn
from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qat_qconfig, prepare_qat
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.fc1, self.relu, self.fc2, self.dequant = QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), DeQuantStub()
    def forward(self, x): return self.dequant(self.fc2(self.relu(self.fc1(self.quant(x)))))
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 8, generator=g), torch.randint(0, 3, (64,), generator=g)

torch.manual_seed(0)
model = Net()
model.qconfig = get_default_qat_qconfig("x86")
model = prepare_qat(model.train())
opt, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
