import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader
class VectorQuantizer(nn.Module):
    def __init__(self, k, d, beta=0.25):
        super().__init__()
        self.k, self.beta = k, beta
        self.embedding = nn.Embedding(k, d)
        self.embedding.weight.data.uniform_(-1 / k, 1 / k)
    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        d = flat.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * flat @ self.embedding.weight.t()
        idx = torch.argmin(d, 1).unsqueeze(1)
        one = torch.zeros(idx.shape[0], self.k).scatter_(1, idx, 1)
        q = (one @ self.embedding.weight).view(z.shape)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        avg = one.mean(0)
        return loss, q.permute(0, 3, 1, 2).contiguous(), torch.exp(-(avg * torch.log(avg + 1e-10)).sum())
class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1))
        self.vq = VectorQuantizer(12, 4)
        self.dec = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1))
    def forward(self, x):
        loss, q, perplexity = self.vq(self.enc(x))
        return loss, self.dec(q), perplexity
images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(3))

torch.manual_seed(0)
model = VQVAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
losses, perps = [], []
for epoch in range(2):
    for x in DataLoader(images, batch_size=16, shuffle=True):
        vq_loss, recon, perplexity = model(x)
        loss = F.mse_loss(recon, x) / images.var() + vq_loss
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item()); perps.append(perplexity.item())
extra = perps
