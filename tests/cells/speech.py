import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
ctc = nn.CTCLoss()
losses = []
frames, words = torch.randint(8, 13, (37,)), torch.randint(2, 5, (37,))
data = TensorDataset(torch.randn(37, 12, 6), torch.randint(1, 5, (37, 4)), frames, words)
for sound, text, in_sound, in_text in DataLoader(data, batch_size=8, shuffle=True):
    log_probabilities = model(sound).log_softmax(-1).transpose(0, 1)
    loss = ctc(log_probabilities, text, in_sound, in_text)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
