"""Hidden states of a Hugging Face model, which registers hooks in its first forward that asks for them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, use_cache=False
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    tokens = torch.randint(0, 20, (6, 4))
    out = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    loss = out.loss + 0.01 * out.hidden_states[1].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
