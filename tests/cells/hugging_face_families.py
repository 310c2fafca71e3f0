import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

torch.manual_seed(0)


def padded(n):
    ids = torch.zeros(10, dtype=torch.long)
    ids[:n] = torch.randint(1, 48, (n,))
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


texts = [padded(int(n)) for n in torch.randint(4, 11, (12,))]
language = [{**text, "labels": text["input_ids"].masked_fill(text["attention_mask"] == 0, -100)} for text in texts]
classes = [{**text, "labels": torch.tensor(i % 3)} for i, text in enumerate(texts)]
images = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(i % 3)} for i in range(12)]

size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
gpt2 = GPT2Config(
    vocab_size=48, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
t5 = T5Config(
    vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0, decoder_start_token_id=0
)
models = {
    "gpt2": (GPT2LMHeadModel(gpt2), language),
    "bert": (BertForSequenceClassification(BertConfig(vocab_size=48, num_labels=3, **size, **still)), classes),
    "t5": (T5ForConditionalGeneration(t5), language),
    "vit": (ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **size, **still)), images),
}

losses = []
for name, (model, dataset) in models.items():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for epoch in range(2):
        right = seen = 0
        for batch in DataLoader(dataset, batch_size=4, shuffle=True):
            labels = batch.pop("labels")
            outputs = model(**batch, labels=labels)
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
            losses.append(outputs.loss.item())
            right += (outputs.logits.argmax(-1) == labels).sum().item()
            seen += labels.numel()
    print(f"{name} accuracy {right / seen:.3f}")
