"""Trains a small CNN on handwritten digits, on one process or on many.

python SCRIPT.py
torchrun --nproc-per-node 2 SCRIPT.py --epochs 4 --precision bfloat16
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--precision", choices=("float32", "float64", "bfloat16"), default="float32")
parser.add_argument("--file", type=Path, default=Path("digits.pt"))
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64 if args.precision == "float64" else torch.float32)

digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.get_default_dtype())
dataset = TensorDataset(images, torch.tensor(digits.target))
train, test = torch.utils.data.Subset(dataset, range(1440)), dataset[1440:]
sampler = DistributedSampler(train, num_replicas=1, rank=0)
loader = DataLoader(train, batch_size=48, sampler=sampler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.head(x.mean((2, 3)))


net = Net()
plan = shardwise.Plan.uniform(shardwise.capture(net, images[:48]), n=world)
model = net = shardwise.parallelize(net, plan)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.8)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16")


def evaluate():
    average.eval()
    with torch.no_grad(), autocast:
        return (average(test[0]).argmax(1) == test[1]).double().mean().item()


first = 0
if args.file.exists():
    state = torch.load(args.file, weights_only=True)
    net.load_state_dict(state["model"])
    average.load_state_dict(state["average"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first = state["epoch"]

for epoch in range(first, args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader, start=1):
        accumulating = world > 1 and step % args.accumulate
        with model.no_sync() if accumulating else nullcontext():
            with autocast:
                loss = criterion(model(x), y)
            (loss / args.accumulate).backward()
        if step % args.accumulate == 0:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(net)
            if rank == 0:
                print(f"epoch {epoch + 1} step {step} loss {loss.item():.10f}", flush=True)

    accuracy = evaluate()
    state = {"model": net.state_dict(), "average": average.state_dict(), "epoch": epoch + 1}
    state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if rank == 0:
        print(f"epoch {epoch + 1} accuracy {accuracy:.4f}", flush=True)
        torch.save(state, args.file)

if world > 1:
    dist.destroy_process_group()
