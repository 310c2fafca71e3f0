import torch
import torch.nn as nn
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator
from ignite.metrics import Accuracy, ConfusionMatrix, EpochMetric, RunningAverage
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix

torch.manual_seed(0)
X = torch.randn(48, 6)
y = (X[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
matrix, mean, total, area = MulticlassConfusionMatrix(2), MeanMetric(), SumMetric(), BinaryAUROC()
evaluator = create_supervised_evaluator(
    model,
    metrics={
        "accuracy": Accuracy(),
        "matrix": ConfusionMatrix(2),
        "first": EpochMetric(lambda out, target: float(out[:, 0].sum() + target.sum())),
    },
)
RunningAverage(output_transform=lambda out: float(out[0].mean())).attach(evaluator, "average")
losses, averages, rows = [], [], []


@evaluator.on(Events.ITERATION_COMPLETED)
def keep(engine):
    averages.append(float(engine.state.metrics.get("average", 0.0)))


for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(X, y), batch_size=8, shuffle=True):
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        matrix.update(out, yb)
        mean.update(loss)
        total.update(yb)
        area.update(out[:, 1], yb)
    rows += [mean.compute().item(), total.compute().item(), area.compute().item(), *matrix.compute().flatten().tolist()]
    evaluator.run(DataLoader(TensorDataset(X, y), batch_size=16))
    seen = evaluator.state.metrics
    rows += [seen["accuracy"], seen["first"], *seen["matrix"].flatten().tolist()]
    for metric in (matrix, mean, total, area):
        metric.reset()
print([round(value, 4) for value in rows])
del evaluator, keep
