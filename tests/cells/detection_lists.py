import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = [(torch.randn(int(n), 4), torch.rand(int(n), 2)) for n in torch.randint(1, 6, (16,))]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, images):
        return [self.net(image).sigmoid() for image in images]


model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for batch in DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda b: tuple(zip(*b))):
    images, boxes = list(batch[0]), list(batch[1])
    predictions = model(images)
    loss = sum(nn.functional.l1_loss(p, b, reduction="sum") for p, b in zip(predictions, boxes)) / len(images)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
