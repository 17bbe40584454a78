"""The digits recipe's network and data, in PyTorch. See recipes/digits.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


class CNN(nn.Module):
    """Logits of ten classes from images `[batch, 1, 8, 8]`."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding="same")
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding="same")
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.pool = nn.AvgPool2d(2)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(2 * 2 * 2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm1(self.conv1(x))))
        x = self.pool(torch.relu(self.norm2(self.conv2(x))))
        return self.out(self.dropout(x.flatten(1)))


def load_digits(file: str) -> TensorDataset:
    """The 1500 training digits, as `compare.py` has written them from the recipe's own."""
    arrays = np.load(file)
    image = torch.from_numpy(arrays["image"]).permute(0, 3, 1, 2).contiguous()
    return TensorDataset(image, torch.from_numpy(arrays["label"]).long())
