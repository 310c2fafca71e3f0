import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(12, 8)
        self.text = nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.ones(1) * 2.0)

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


model = CLIP()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pairs = TensorDataset(torch.randn(48, 12), torch.randn(48, 10))
losses = []
for epoch in range(2):
    for img, txt in DataLoader(pairs, batch_size=12, shuffle=True, drop_last=True):
        img_emb, txt_emb, scale = model(img, txt)
        logits = scale * img_emb @ txt_emb.t()
        labels = torch.arange(len(img))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
