"""One worker that trains the digits in PyTorch, plainly or with torchft.

    torchrun ... train_torch.py --mode torchft --data digits.npz --log worker-0.jsonl

`torchft` is the loop of torchft's own example, train_ddp.py: its DistributedDataParallel,
Optimizer, DistributedSampler, PGTransport and timeouts, torchdata's StatefulDataLoader. `ddp` is
the same under PyTorch's own DistributedDataParallel, `plain` one all-reduce of all gradients in a
flat buffer. Each attempt at a step becomes a line of the log: when, its step, whether it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from digits_torch import CNN, load_digits
from torch import nn, optim
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

LEARNING_RATE = 3e-3
RANK = int(os.environ["REPLICA_GROUP_ID"])
WORKERS = int(os.environ["NUM_REPLICA_GROUPS"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["plain", "ddp", "torchft"], required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=60, help="samples a step of this worker")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--heartbeat-s", type=float, default=0.1, help="torchft's own default")
    parser.add_argument("--gloo-s", type=float, default=5.0, help="the example's")
    arguments = parser.parse_args()
    if arguments.mode == "torchft":
        train_torchft(arguments)
    else:
        train_plain(arguments)


def logger(file: str) -> Callable[..., None]:
    """Appends lines to this worker's log, which outlives it."""
    log = open(file, "a", buffering=1)
    return lambda **line: log.write(
        json.dumps({"t": time.time(), "pid": os.getpid(), **line}) + "\n"
    )


def batches(dataset: torch.utils.data.Dataset, sampler: Sampler, size: int) -> Iterator:
    """Batches for ever, each with its number within the epoch.

    The example reads with two processes more; these samples lie in memory, and two cores have
    enough to do.
    """
    loader = StatefulDataLoader(dataset, batch_size=size, num_workers=0, sampler=sampler)
    while True:
        yield from enumerate(loader)


def train_torchft(arguments: argparse.Namespace) -> None:
    from torchft import (
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )
    from torchft.checkpointing.pg_transport import PGTransport

    log = logger(arguments.log)
    at: dict[str, int] = {}  # which batch is being worked on, for the log

    class Watched(Manager):
        """Tells of each answer of `should_commit`."""

        def should_commit(self, *args, **kwargs) -> bool:
            step, committed = self.current_step(), super().should_commit(*args, **kwargs)
            log(
                step=step + 1,
                committed=committed,
                counts=committed and self.is_participating(),
                participants=self.num_participants(),
                **at,
            )
            return committed

    dataset = load_digits(arguments.data)
    sampler = DistributedSampler(
        dataset,
        replica_rank=RANK,
        num_replica_groups=WORKERS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )

    def load_state_dict(state_dict):
        m.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optim"])

    def state_dict():
        return {"model": m.state_dict(), "optim": optimizer.state_dict()}

    pg = ProcessGroupGloo(timeout=timedelta(seconds=arguments.gloo_s))
    manager = Watched(
        pg=pg,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{RANK}",
        timeout=timedelta(seconds=30),
        heartbeat_interval=timedelta(seconds=arguments.heartbeat_s),
        checkpoint_transport=PGTransport(
            pg, timeout=timedelta(seconds=10), device=torch.device("cpu")
        ),
    )
    m = DistributedDataParallel(manager, CNN(arguments.width))
    optimizer = Optimizer(manager, optim.Adam(m.parameters(), lr=LEARNING_RATE))
    criterion = nn.CrossEntropyLoss()

    for number, (inputs, labels) in batches(dataset, sampler, arguments.batch):
        at.update(batch=number, samples=len(labels))
        optimizer.zero_grad()
        loss = criterion(m(inputs), labels)
        loss.backward()
        optimizer.step()
        if manager.current_step() >= arguments.steps:
            break


def train_plain(arguments: argparse.Namespace) -> None:
    """The same without torchft; it ends when one worker does."""
    log = logger(arguments.log)
    dist.init_process_group("gloo", rank=RANK, world_size=WORKERS)
    torch.manual_seed(0)
    dataset = load_digits(arguments.data)
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=WORKERS, rank=RANK)
    m = CNN(arguments.width)
    parameters = list(m.parameters())
    if arguments.mode == "ddp":
        m = nn.parallel.DistributedDataParallel(m)
    optimizer = optim.Adam(parameters, lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()

    step = 0
    for number, (inputs, labels) in batches(dataset, sampler, arguments.batch):
        optimizer.zero_grad()
        loss = criterion(m(inputs), labels)
        loss.backward()
        if arguments.mode == "plain":
            average(parameters)
        optimizer.step()
        step += 1
        log(step=step, committed=True, counts=True, participants=WORKERS, batch=number,
            samples=len(labels))  # fmt: skip
        if step >= arguments.steps:
            break
    dist.destroy_process_group()


def average(parameters: list[nn.Parameter]) -> None:
    """Gradients become their mean over the workers, in one all-reduce."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= WORKERS
    start = 0
    for p in parameters:
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


if __name__ == "__main__":
    main()
