"""Modules of every kind that a stage may be made of."""

import torch
from torch import nn


class Split(nn.Module):
    """Keeps its input beside its output, for a later layer: a residual that skips over stages."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), x


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, kept):
        return torch.relu(self.inner(x)), kept


class Join(nn.Module):
    def forward(self, x, kept):
        return x + kept


def embedded():
    return [nn.Embedding(50, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8),
            nn.Linear(8, 10)]  # fmt: skip


def residual():
    return [nn.Linear(8, 8), Split(), Middle(), Join(), nn.Linear(8, 10)]


def frozen_first():
    modules = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 10)]
    modules[0].requires_grad_(False)
    return modules


def batch_normed():
    return [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)]


def no_parameters_at_first():
    return [nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)]
