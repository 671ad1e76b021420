"""A directory of checkpoints: each appears whole or not at all, and one run at a time writes there."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from step0_monolith.files import sync, write_whole
from step0_monolith.options import Options, RunError, UsageError, folder, option, optional, switch, whole
from step0_monolith.payload import Payload, PayloadError, pack_into, unpack

VERSION = 1
MANIFEST = "checkpoint.json"
INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"iteration-([0-9]{8}|[1-9][0-9]{8,})")
_REPLACED = re.compile(r"\.part-([0-9]+)-old")
_FILE = re.compile(r"rank-\d+\.safetensors")
_LOCK_SECONDS = 10.0


def file_of(rank: int) -> str:
    """The file that a rank writes; the monolith is rank 0."""
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Where, and how often, a run saves what it must not lose."""

    checkpoint_dir: Path | None = option(
        None, optional(folder), "directory for checkpoints, of this run alone (default: none are saved)"
    )
    checkpoint_every: int | None = option(
        None, optional(whole(1)), "iterations between two checkpoints (default: only the end is saved)"
    )
    keep_checkpoints: int = option(2, whole(1, 1_000_000), "how many checkpoints stay; older ones are removed")
    resume: bool = option(False, switch, "go on from the newest checkpoint in --checkpoint-dir, if there is one")

    def check_together(self) -> None:
        """Raises UsageError for flags that need a directory."""
        if self.checkpoint_dir is None:
            for flag, given in (("--checkpoint-every", self.checkpoint_every), ("--resume", self.resume)):
                if given:
                    raise UsageError(f"{flag} needs --checkpoint-dir")


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint. manifest: `iteration`, `config`, `files` and what the writer adds about itself."""

    path: Path
    manifest: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.manifest["iteration"]

    def payloads(self, layers: Iterable[int]) -> dict[str, Payload]:
        """The files that hold any of `layers`, by name. Raises PayloadError, as `payload` does."""
        wanted = set(layers)
        return {
            name: self.payload(name) for name, entry in self.manifest["files"].items() if wanted & {*entry["layers"]}
        }

    def payload(self, name: str) -> Payload:
        """What a file holds, checked. Raises PayloadError when it is damaged, missing, or not what was saved."""
        what = f"checkpoint {str(self.path / name)!r}"
        try:
            if name not in self.manifest["files"]:
                raise PayloadError(f"{what} was not saved{self.way_out()}")
            entry = self.manifest["files"][name]
            size = (self.path / name).stat().st_size
            if size != entry["bytes"]:
                raise PayloadError(f"{what} has {size} bytes, and {entry['bytes']} were saved{self.way_out()}")
            payload = unpack((self.path / name).read_bytes(), what)
        except OSError as error:
            raise PayloadError(f"{what} cannot be read: {error.strerror}{self.way_out()}") from None
        except PayloadError as error:
            raise error if self.way_out() in str(error) else PayloadError(f"{error}{self.way_out()}") from None
        if payload.sha256 != entry["sha256"]:
            raise PayloadError(f"{what} is not the file that was saved there{self.way_out()}")
        return payload

    def way_out(self) -> str:
        """What to do about a damaged checkpoint."""
        return f"; remove {str(self.path)!r} to go on from the one before"


class CheckpointDirectory:
    """The checkpoints of one run, `iteration-00000010` and so on, and a file `latest` with the newest one's name."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self._keep, self._lock = path, keep, None

    def lock(self, seconds: float = _LOCK_SECONDS) -> None:
        """Makes the directory if need be, keeps other runs out of it until `close`, and clears away unfinished ones.

        A run that was killed loses the lock with its process; whoever comes then waits a moment. Raises UsageError for
        a directory that cannot be written, or in which another run writes.
        """
        given = f"--checkpoint-dir {str(self.path)!r}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Not through a link: what it points to is somebody else's.
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise UsageError(f"{given} cannot be written ({error.strerror}); choose another place") from None
        try:
            self._wait_for_lock(given, seconds)
            with _writing(self.path):
                self._clear_up()
        except BaseException:
            self.close()
            raise

    def _wait_for_lock(self, given: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    who = os.pread(self._lock, 100, 0).decode(errors="replace").strip() or "another run"
                    raise UsageError(
                        f"{given}: {who} writes there; wait for its end, or choose another place"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                raise UsageError(f"{given} cannot be locked ({error.strerror}); choose another place") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}\n".encode(), 0)

    def _clear_up(self) -> None:
        """After a run that was killed: puts back what it was about to replace, and removes what is not whole."""
        for replaced in self.path.glob(".part-*-old"):
            match = _REPLACED.fullmatch(replaced.name)
            if match and not self._path_of(int(match[1])).exists():
                os.rename(replaced, self._path_of(int(match[1])))
        for unfinished in self.path.glob(".part-*"):
            _remove(unfinished)
        self._name_latest()

    def close(self) -> None:
        """Lets other runs in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def iterations(self) -> list[int]:
        """Of all whole checkpoints, ascending."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(m[1]) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir())
        return []

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint. Raises PayloadError when its manifest is damaged."""
        iterations = self.iterations()
        return self.at(iterations[-1]) if iterations else None

    def at(self, iteration: int) -> Checkpoint:
        """The checkpoint of an iteration. Raises PayloadError when it is not there or its manifest is damaged."""
        return _open(self._path_of(iteration))

    def part(self, iteration: int, run: str) -> Path:
        """Where the checkpoint of an iteration is written; the same for all ranks of the run called `run`."""
        return self.path / f".part-{iteration}-{run}"

    def publish(self, part: Path, manifest: Mapping[str, Any]) -> None:
        """Makes a written checkpoint visible, all at once, and removes the oldest.

        manifest: with `iteration`, and `files`: for each its `bytes`, `sha256`, `layers` and `tensors`. Raises RunError
        when the disk refuses; what was visible before then stays.
        """
        fields = {"version": VERSION, **manifest}
        index = {name: file for file, entry in fields["files"].items() for name in entry["tensors"]}
        fields["files"] = {n: {k: e[k] for k in ("bytes", "sha256", "layers")} for n, e in fields["files"].items()}
        final, before = self._path_of(fields["iteration"]), self.part(fields["iteration"], "old")
        size = sum(entry["bytes"] for entry in fields["files"].values())
        with _writing(final):
            try:
                self._complete(part, fields, _json({"metadata": {"total_size": size}, "weight_map": index}))
                if final.exists():
                    os.rename(final, before)
                os.rename(part, final)
            except BaseException:
                if before.exists() and not final.exists():
                    os.rename(before, final)
                _remove(part)
                raise
            sync(self.path)
            self._name_latest()
            for iteration in self.iterations()[: -self._keep]:
                # Out of sight first: half a checkpoint must not be seen under a whole one's name.
                gone = self.part(iteration, "gone")
                os.rename(self._path_of(iteration), gone)
                _remove(gone)
            _remove(before)

    def _complete(self, part: Path, fields: Mapping[str, Any], index: bytes) -> None:
        for name, entry in fields["files"].items():
            if not (part / name).exists() or (part / name).stat().st_size != entry["bytes"]:
                raise RunError(f"{str(part / name)!r} is not here; all hosts must share --checkpoint-dir")
        write_file(part / INDEX, index)
        write_file(part / MANIFEST, _json({"sha256": _digest(fields), **fields}))
        sync(part)

    def _path_of(self, iteration: int) -> Path:
        return self.path / f"iteration-{iteration:08d}"

    def _name_latest(self) -> None:
        iterations, latest = self.iterations(), self.path / "latest"
        if iterations:
            write_whole(latest, lambda path: path.write_text(self._path_of(iterations[-1]).name + "\n"))
        else:
            latest.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"checkpoint {str(path)!r} could not be written: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Writes a file of a checkpoint that is not visible yet, down to the disk. Raises RunError when that refuses."""
    with _writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        sync(path)


def write_payload(path: Path, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a rank's file of a checkpoint that is not visible yet; returns its size and checksum for the manifest.

    Raises RunError when the disk refuses.
    """
    with _writing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            digest = pack_into(path, tensors, scalars)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return {"bytes": path.stat().st_size, "sha256": digest}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json(fields)).hexdigest()


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ValueError where a field is missing or of another kind: a right checksum does not say who made it."""
    if not isinstance(fields.get("config"), dict):
        raise ValueError("it has no config")
    if not isinstance(fields.get("num_ranks"), int):
        raise ValueError("it has no number of ranks")
    if not isinstance(fields.get("files"), dict):
        raise ValueError("it has no list of files")
    for name, entry in fields["files"].items():
        if not _FILE.fullmatch(name):
            raise ValueError("it names files that are no part of a checkpoint")
        kinds = {"bytes": int, "sha256": str, "layers": list}
        if not isinstance(entry, dict) or any(not isinstance(entry.get(key), kind) for key, kind in kinds.items()):
            raise ValueError(f"what it says of {name} cannot be read")
        if not all(isinstance(layer, int) for layer in entry["layers"]):
            raise ValueError(f"the layers of {name} are not numbers")


def _open(path: Path) -> Checkpoint:
    """Raises PayloadError for a manifest that is damaged or missing."""
    checkpoint = Checkpoint(path, {})
    what = f"checkpoint {str(path / MANIFEST)!r}"
    try:
        fields = json.loads((path / MANIFEST).read_bytes())
        digest = fields.pop("sha256")
        if _digest(fields) != digest:
            raise ValueError("its checksum does not match its text")
        if fields["version"] != VERSION:
            raise ValueError(f"it has version {fields['version']!r}, and this program reads version {VERSION}")
        if type(fields["iteration"]) is not int or fields["iteration"] != int(path.name.split("-")[1]):
            raise ValueError(f"it is of iteration {fields['iteration']}")
        _check_fields(fields)
    except OSError as error:
        raise PayloadError(f"{what} cannot be read: {error.strerror}{checkpoint.way_out()}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PayloadError(f"{what} is damaged: {error}{checkpoint.way_out()}") from None
    return Checkpoint(path, fields)
