import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


def tokenize(n):
    ids = torch.zeros(12, dtype=torch.long)
    ids[:n] = torch.randint(1, 48, (n,))
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


dataset = [tokenize(int(n)) for n in torch.randint(4, 13, (24,))]
losses = []
model.train()
for epoch in range(2):
    for batch in DataLoader(dataset, batch_size=6, shuffle=True):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"epoch {epoch} perplexity {torch.exp(torch.tensor(losses[-4:]).mean()).item():.3f}")
