"""Imported once by the process that the pool's ranks are forked from."""

import torch
import torch.distributed  # noqa: F401

import step2_comms.p2p  # noqa: F401
