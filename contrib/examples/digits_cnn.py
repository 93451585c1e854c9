"""Handwritten digits with a small convolutional net: batch norm, dropout, a learning-rate schedule.

python digits_cnn.py                                 one process
torchrun --nproc_per_node=2 digits_cnn.py            a fixed world
fallow run -- python digits_cnn.py                   elastic, inside a batch script
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from torch.utils.data import DataLoader, TensorDataset

import fallow


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
    model.train()
    return float(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=25, help="samples in one shard")
    parser.add_argument("--global-batch", type=int, default=100, help="samples in one optimizer step")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    train, test = data()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)

    run = fallow.init()
    model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader, global_batch=args.global_batch)
    for epoch in run.epochs(args.epochs):
        for update in run.updates(loader):
            for images, labels in update:
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                update.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if run.is_main:
            print(f"epoch {epoch}: step {run.step}, members {run.size}, lr {schedule.get_last_lr()[0]:.4f}")
    if run.is_main:
        print(f"accuracy {accuracy(model, test):.4f} after {run.step} steps")


if __name__ == "__main__":
    main()
