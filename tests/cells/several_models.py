import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))
decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))
classifier = nn.Linear(4, 3)
optimizer = torch.optim.SGD(
    itertools.chain(encoder.parameters(), decoder.parameters(), classifier.parameters()), lr=0.1
)
data = TensorDataset(torch.randn(40, 10), torch.randint(0, 3, (40,)))
losses = []
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=10, shuffle=True):
        z = encoder(x)
        reconstruction = nn.functional.mse_loss(decoder(z), x)
        classification = nn.functional.cross_entropy(classifier(z), y)
        loss = reconstruction + 0.5 * classification
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
model = encoder
