import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class CausalLM(nn.Module):
    """The loss as Hugging Face models compute it: a mean over the tokens that are labelled."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 10)
        self.gru = nn.GRU(10, 10, batch_first=True)
        self.lm_head = nn.Linear(10, 25)

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.gru(self.embed(input_ids))[0])
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, 25), shift_labels.view(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
rows = []
for n in torch.randint(3, 10, (32,)).tolist():
    ids = torch.zeros(10, dtype=torch.long)
    ids[:n] = torch.randint(1, 25, (n,))
    rows.append({"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)})

model = CausalLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for step, batch in enumerate(DataLoader(rows, batch_size=8, shuffle=True)):
    loss = model(**batch)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print({"loss": round(loss.item(), 4), "step": step})
