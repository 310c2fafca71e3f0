import torch
from torch import autograd, nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))
generator = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer_C = torch.optim.SGD(critic.parameters(), lr=0.05)
optimizer_G = torch.optim.SGD(generator.parameters(), lr=0.05)
lambda_gp = 10


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1)
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


losses = []
data = torch.randn(40, 2) + 3
for step, real in enumerate(DataLoader(data, batch_size=10, shuffle=True)):
    z = torch.randn(len(real), 3)
    fake = generator(z).detach()
    gp = compute_gradient_penalty(critic, real, fake)
    c_loss = critic(fake).mean() - critic(real).mean() + lambda_gp * gp
    optimizer_C.zero_grad()
    c_loss.backward()
    optimizer_C.step()
    losses.append(c_loss.item())
    if step % 2 == 1:
        g_loss = -critic(generator(torch.randn(len(real), 3))).mean()
        optimizer_G.zero_grad()
        g_loss.backward()
        optimizer_G.step()
        losses.append(g_loss.item())
model = critic
