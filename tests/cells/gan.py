import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
latent_dim = 4
G = nn.Sequential(nn.Linear(latent_dim, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_G = torch.optim.SGD(G.parameters(), lr=0.05)
opt_D = torch.optim.SGD(D.parameters(), lr=0.05)
bce = nn.BCEWithLogitsLoss()
real_data = torch.randn(48, 2) * 0.5 + torch.tensor([2.0, -1.0])
dataloader = DataLoader(real_data, batch_size=16, shuffle=True)

losses = []
for epoch in range(2):
    for i, real in enumerate(dataloader):
        bs = real.size(0)
        # train the discriminator
        for p in D.parameters():
            p.requires_grad_(True)
        fake = G(torch.randn(bs, latent_dim)).detach()
        d_loss = bce(D(real), torch.ones(bs, 1)) + bce(D(fake), torch.zeros(bs, 1))
        opt_D.zero_grad()
        d_loss.backward()
        opt_D.step()

        # train the generator
        for p in D.parameters():
            p.requires_grad_(False)
        g_loss = bce(D(G(torch.randn(bs, latent_dim))), torch.ones(bs, 1))
        opt_G.zero_grad()
        g_loss.backward()
        opt_G.step()
        losses += [d_loss.item(), g_loss.item()]
    print("[Epoch %d] D: %.4f G: %.4f" % (epoch, d_loss.item(), g_loss.item()))
model = G
