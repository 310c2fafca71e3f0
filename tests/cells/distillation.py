import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
student = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
teacher.eval()
optimizer = torch.optim.SGD(student.parameters(), lr=0.2)
T, alpha = 2.0, 0.7
data = TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
losses = []
for epoch in range(2):
    student.train()
    for inputs, labels in DataLoader(data, batch_size=20, shuffle=True):
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft = F.kl_div(
            F.log_softmax(student_logits / T, dim=-1), F.softmax(teacher_logits / T, dim=-1), reduction="batchmean"
        )
        loss = alpha * soft * T * T + (1 - alpha) * F.cross_entropy(student_logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
model = student
