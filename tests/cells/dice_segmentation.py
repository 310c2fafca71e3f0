import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.rand(20, 1, 8, 8)
masks = (images > 0.6).float()


class TinyUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(5, 1, 1)

    def forward(self, x):
        h = torch.relu(self.up(torch.relu(self.down(x))))
        return self.head(torch.cat([h, x], dim=1))


def dice_loss(logits, target, smooth=1.0):
    prob = logits.sigmoid()
    intersection = (prob * target).sum()
    return 1 - (2 * intersection + smooth) / (prob.sum() + target.sum() + smooth)


model = TinyUNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses, scores = [], []
for epoch in range(2):
    model.train()
    for image, mask in DataLoader(TensorDataset(images, masks), batch_size=10, shuffle=True):
        optimizer.zero_grad()
        loss = dice_loss(model(image), mask)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        pred = (model(images).sigmoid() > 0.5).float()
        iou = (pred * masks).sum() / ((pred + masks) > 0).sum()
    scores.append(iou.item())
    print("epoch", epoch, "IoU %.3f" % iou.item())
