"""Random numbers that depend on what they are for, never on who draws them or when."""

import hashlib

import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, such as ("layer", 3); different purposes give unrelated seeds."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator that starts at `seed_for(seed, *purpose)`."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))
