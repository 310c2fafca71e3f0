import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
ntokens, bptt, batch_size = 20, 6, 6


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ntokens, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1, enable_nested_tensor=False
        )
        self.linear = nn.Linear(8, ntokens)

    def forward(self, src, src_mask):
        return self.linear(self.encoder(self.embedding(src), src_mask))


def batchify(data, bsz):
    seq_len = data.size(0) // bsz
    return data[: seq_len * bsz].view(bsz, seq_len).t().contiguous()


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


train_data = batchify(torch.randint(0, ntokens, (6 * 25,)), batch_size)
model = TransformerModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
src_mask = nn.Transformer.generate_square_subsequent_mask(bptt)
losses = []
for i in range(0, train_data.size(0) - 1, bptt):
    data, targets = get_batch(train_data, i)
    output = model(data, src_mask[: len(data), : len(data)])
    loss = F.cross_entropy(output.view(-1, ntokens), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
