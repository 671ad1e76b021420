"""Tensors and scalars as bytes that can be checked: a safetensors file with its own SHA-256 in the header."""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from step0_monolith.files import make_ordinary
from step0_monolith.options import RunError

VERSION = "1"
KIND = "pipeline parallelism course"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
CHUNK_BYTES = 2**20
_NO_DIGEST = "0" * 64


class PayloadError(RunError):
    """Bytes that are not what they should be: damaged, cut short, foreign, or of something else."""


class Payload(NamedTuple):
    """tensors by name; scalars: what JSON can hold; sha256: of all bytes, with zeros in its own place."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    sha256: str


def pack(tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> bytes:
    """The bytes of a safetensors file (any reader of that format reads the tensors), scalars as JSON in its header.

    Nothing in it can be code, unlike a pickle. Raises ValueError for a scalar that JSON cannot hold.
    """
    data = safetensors.torch.save(_plain(tensors), _about(scalars))
    start = _place(data[: 8 + int.from_bytes(data[:8], "little")])
    digest = hashlib.sha256(data).hexdigest().encode()
    return b"".join((data[:start], digest, memoryview(data)[start + 64 :]))


def pack_into(path: Path, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> str:
    """Writes the bytes of `pack` to a file, down to the disk, without another copy of them in memory; returns the
    checksum.

    Other threads go on meanwhile, which `pack` would hold up. Raises OSError when the disk refuses.
    """
    try:
        safetensors.torch.save_file(_plain(tensors), path, _about(scalars))
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from None
    make_ordinary(path)
    with open(path, "r+b") as file:
        found = hashlib.sha256()
        while piece := file.read(CHUNK_BYTES):
            found.update(piece)
        digest = found.hexdigest()
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        file.seek(0)
        file.seek(_place(file.read(8 + size)))
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())
    return digest


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def _about(scalars: Mapping[str, Any]) -> dict[str, str]:
    text = json.dumps(dict(scalars), allow_nan=False)
    return {"format": "pt", "kind": KIND, "version": VERSION, "sha256": _NO_DIGEST, "scalars": text}


def _place(header: bytes) -> int:
    """Where the checksum stands. The name is there once as a key, since quotes inside strings are escaped."""
    return header.index(b'"sha256":"') + len(b'"sha256":"')


def unpack(data: bytes, what: str = "the payload") -> Payload:
    """What `pack` has put in. `what` names the bytes in errors.

    Safe on bytes from strangers: nothing is executed, and nothing larger than the bytes themselves is made. A checksum
    finds accidents; it proves nothing about who made the bytes. Raises PayloadError that says what is wrong.
    """
    header, size = _header(data, what)
    about = header.get("__metadata__")
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise PayloadError(f"{what} is a safetensors file, but not one of this course")
    if about.get("version") != VERSION:
        raise PayloadError(f"{what} has version {about.get('version')!r}; this program reads version {VERSION}")
    digest = about.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise PayloadError(f"{what} is damaged: it has no checksum")
    if _digest(data, size, digest) != digest:
        raise PayloadError(f"{what} is damaged: its checksum does not match its bytes")
    try:
        scalars = json.loads(about["scalars"])
        tensors = safetensors.torch.load(data)
    except (KeyError, TypeError, ValueError, RecursionError, safetensors.SafetensorError, RuntimeError) as error:
        first_line, *_ = [*str(error).splitlines(), ""]  # torch adds a stack of its own
        raise PayloadError(f"{what} cannot be read: {type(error).__name__}: {first_line}") from None
    if not isinstance(scalars, dict):
        raise PayloadError(f"{what} has no table of scalars")
    return Payload(tensors, scalars, digest)


def _header(data: bytes, what: str) -> tuple[dict[str, Any], int]:
    """The header, and where it ends; checks that all bytes are there that it promises."""
    size = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 10 or size > MAX_HEADER_BYTES or data[8:9] != b"{":
        raise PayloadError(f"{what} is no safetensors file ({len(data)} bytes)")
    if size > len(data):
        raise PayloadError(f"{what} is cut short: {len(data)} bytes, and its header alone has {size}")
    try:
        header = json.loads(bytes(data[8:size]))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        total = size + max(ends, default=0)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
        raise PayloadError(f"{what} is no safetensors file: its header cannot be read") from None
    if len(data) != total:
        verb = "is cut short" if len(data) < total else "is too long"
        raise PayloadError(f"{what} {verb}: {len(data)} bytes, and its header promises {total}")
    return header, size


def _digest(data: bytes, size: int, digest: str) -> str:
    place = data.find(digest.encode(), 0, size)
    if place < 0:
        return ""
    found = hashlib.sha256(data[:place])
    found.update(_NO_DIGEST.encode())
    found.update(memoryview(data)[place + 64 :])
    return found.hexdigest()


def is_scalar(value: object) -> bool:
    """Whether a value can be among the scalars: None, truth values, finite numbers, text, and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(is_scalar, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
