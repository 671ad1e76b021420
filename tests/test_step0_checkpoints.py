"""Step 0: checkpoints appear whole or not at all, one run at a time writes them, and what is damaged is refused."""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from step0_monolith import checkpoints as module
from step0_monolith.checkpoints import INDEX, MANIFEST, CheckpointDirectory, CheckpointOptions, write_payload
from step0_monolith.options import RunError, UsageError
from step0_monolith.payload import PayloadError
from step0_monolith.train import FILE, Training, train
from tests.monolith import assert_same_bits, named, small
from tests.ranks import python, run_command

NO_SPACE = OSError(28, "No space left on device")


def publish(directory: CheckpointDirectory, iteration: int, value: float = 0.0, num_files: int = 2) -> None:
    """A checkpoint with layer i in file i."""
    part, entries = directory.part(iteration, "test"), {}
    for i in range(num_files):
        tensors = {f"{i}.weight": torch.full((4,), value + i), f"history/{i}": torch.ones(min(iteration, 99))}
        written = write_payload(part / f"rank-{i}.safetensors", tensors, {"layers": [i], "iterations": iteration})
        entries[f"rank-{i}.safetensors"] = {**written, "layers": [i], "tensors": [f"{i}.weight"]}
    directory.publish(
        part, {"iteration": iteration, "config": {"seed": 0}, "num_ranks": len(entries), "files": entries}
    )


def value_of(checkpoint: module.Checkpoint) -> float:
    """What `publish` was given, after everything in the checkpoint was read and checked."""
    payloads = checkpoint.payloads(range(9))
    assert len(payloads) == len(checkpoint.manifest["files"])
    values = {p.tensors[f"{i}.weight"][0].item() - i for i, p in enumerate(payloads.values())}
    assert {len(p.tensors[f"history/{i}"]) for i, p in enumerate(payloads.values())} == {min(checkpoint.iteration, 99)}
    (value,) = values
    return value


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def name(iteration: int) -> str:
    return f"iteration-{iteration:08d}"


def latest(path: Path) -> str:
    return (path / "latest").read_text().strip()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """That it is waited for is a test of its own."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def directory(tmp_path):
    made = CheckpointDirectory(tmp_path / "checkpoints")
    made.lock()
    yield made
    made.close()


def test_what_is_there_after_each_checkpoint(directory):
    assert directory.newest() is None
    assert names(directory.path) == ["lock"]
    for iteration in (5, 10, 15, 123456789):
        publish(directory, iteration, iteration)
        assert latest(directory.path) == name(iteration)
        assert value_of(directory.newest()) == iteration
    assert names(directory.path) == [name(15), "iteration-123456789", "latest", "lock"]
    assert directory.iterations() == [15, 123456789]
    assert value_of(directory.at(15)) == 15
    assert names(directory.path / name(15)) == [MANIFEST, INDEX, "rank-0.safetensors", "rank-1.safetensors"]


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_asked_for(tmp_path, keep):
    directory = CheckpointDirectory(tmp_path, keep)
    for iteration in range(1, 6):
        publish(directory, iteration)
        assert directory.iterations() == list(range(1, iteration + 1))[-keep:]


def test_only_files_with_wanted_layers_are_read(directory):
    publish(directory, 5)
    (directory.path / name(5) / "rank-1.safetensors").unlink()
    newest = directory.newest()
    assert list(newest.payloads([0])) == ["rank-0.safetensors"]
    assert newest.payloads([7]) == {}
    with pytest.raises(PayloadError, match=r"rank-1\.safetensors' cannot be read: No such file"):
        newest.payloads([0, 1])


class Killed(BaseException):
    """Stands for kill -9: no `except OSError` sees it."""


# Every way in which a checkpoint's code asks the system for something that changes the disk.
CALLS = [
    *((os, call) for call in ("open", "fsync", "rename", "replace", "chmod")),
    *((Path, call) for call in ("write_bytes", "write_text", "mkdir", "unlink")),
    (tempfile, "mkstemp"),
    (safetensors.torch, "save_file"),
    (shutil, "rmtree"),
]


class Fails:
    """Lets the calls through until the given one, which does half its work and fails."""

    def __init__(self, monkeypatch, at: int, error: BaseException) -> None:
        self.count, self.at, self.error, self.name = 0, at, error, None
        for owner, call in CALLS:
            monkeypatch.setattr(owner, call, self._around(owner, call))

    def _around(self, owner, call):
        original = getattr(owner, call)

        def wrapped(*args, **kwargs):
            self.count += 1
            # A killed process does nothing more; its `finally` must not either.
            if self.count == self.at or (self.count > self.at and isinstance(self.error, Killed)):
                self.name = self.name or call
                if call.startswith("write_"):
                    original(args[0], args[1][: len(args[1]) // 2])
                elif call == "rmtree":
                    os.unlink(next(Path(args[0]).iterdir()))
                raise self.error
            return original(*args, **kwargs)

        return wrapped


def test_all_is_on_the_disk_before_it_is_visible(directory, monkeypatch):
    done = []

    def fsync(descriptor):
        done.append(os.fstat(descriptor).st_ino)

    def rename(source, target, original=os.rename):
        done.append(f"rename {Path(target).name}")
        original(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", lambda source, target: rename(source, target))
    publish(directory, 5)
    final = directory.path / name(5)
    visible, seen = done.index(f"rename {name(5)}"), done.index("rename latest")
    whole = {path.stat().st_ino for path in [final, *final.iterdir()]}
    assert len(whole) == 5
    assert whole <= {*done[:visible]}
    assert directory.path.stat().st_ino in done[visible:seen]  # before `latest` names it
    assert (directory.path / "latest").stat().st_ino in done[visible:seen]


ERRORS = [NO_SPACE, Killed(), pytest.param(PermissionError(13, "Permission denied"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("error", ERRORS, ids=["full", "killed", "denied"])
def test_whichever_call_fails_the_older_checkpoint_stands(tmp_path, error):
    failed = []
    for at in range(1, 200):
        directory = CheckpointDirectory(tmp_path / str(at))
        directory.lock()
        publish(directory, 5, 5.0)
        publish(directory, 10, 10.0)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            calls, said = Fails(patch, at, error), ""
            try:
                publish(directory, 15, 15.0)
            except RunError as caught:
                said = str(caught)
            if said:
                assert re.fullmatch(f"(checkpoint )?'.*' could not be written: {error.strerror}", said)
        assert latest(directory.path) in names(directory.path)
        assert value_of(directory.at(int(latest(directory.path).split("-")[1]))) >= 10
        assert all(value_of(directory.at(i)) == i for i in directory.iterations())
        assert {10, 15} & {*directory.iterations()}
        # The next run clears up, knows the newest one, and saves.
        directory.close()
        directory.lock()
        assert latest(directory.path) == name(directory.iterations()[-1])
        assert not [n for n in names(directory.path) if n.startswith(".part-")]
        publish(directory, 15, 16.0)
        assert (value_of(directory.newest()), latest(directory.path)) == (16.0, name(15))
        directory.close()
        if calls.name is None:
            break
        failed.append(calls.name)
    assert {call for _, call in CALLS} - {*failed} == set(), "a call that never failed"
    assert 20 < len(failed) < 100


@pytest.mark.parametrize("at", range(1, 4))
def test_a_rename_that_fails_does_not_lose_an_older_one_of_the_same_iteration(directory, monkeypatch, at):
    publish(directory, 5, 5.0)
    original, calls = os.rename, []

    def rename(*args):
        calls.append(args)
        if len(calls) == at:
            raise NO_SPACE
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with contextlib.suppress(RunError):
            publish(directory, 5, 6.0)
    directory.close()
    directory.lock()
    assert value_of(directory.newest()) in (5.0, 6.0)
    assert latest(directory.path) == name(5)


def test_a_missing_or_short_file_is_not_published(directory):
    publish(directory, 5, 5.0)
    part, file = directory.part(10, "test"), directory.part(10, "test") / "rank-0.safetensors"
    for change in (file.unlink, lambda: os.truncate(file, file.stat().st_size - 1)):
        entry = {**write_payload(file, {"0.weight": torch.ones(4)}, {}), "layers": [0], "tensors": ["0.weight"]}
        change()
        with pytest.raises(RunError, match="is not here; all hosts must share --checkpoint-dir"):
            directory.publish(part, {"iteration": 10, "files": {file.name: entry}})
        assert directory.iterations() == [5]
        assert names(directory.path) == [name(5), "latest", "lock"]


def test_a_file_that_does_not_reach_the_disk_is_taken_away(directory, monkeypatch):
    def refuse(descriptor):
        raise NO_SPACE

    file = directory.part(5, "test") / "rank-0.safetensors"
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=rf"^checkpoint '{file}' could not be written: No space left on device$"):
        write_payload(file, {"0.weight": torch.ones(4)}, {})
    assert not file.exists()


@contextlib.contextmanager
def no_more_than(num_bytes: int):
    """The system itself refuses to make files larger than this, after it has written that much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_the_system_refuses_to_finish(tmp_path):
    options = CheckpointOptions(checkpoint_dir=tmp_path / "c", checkpoint_every=1)
    train(small(num_iterations=1), checkpoints=options)
    again = CheckpointOptions(checkpoint_dir=tmp_path / "c", checkpoint_every=1, resume=True)
    with no_more_than(1000), pytest.raises(RunError, match=r"could not be written: File too large$"):
        train(small(num_iterations=2), checkpoints=again)
    assert not [*(tmp_path / "c").glob(".part-*/*")]  # what was half written takes no room
    assert (latest(tmp_path / "c"), CheckpointDirectory(tmp_path / "c").iterations()) == (name(1), [1])
    assert len(train(small(num_iterations=2), checkpoints=again).losses) == 2
    assert names(tmp_path / "c") == [name(1), name(2), "latest", "lock"]


@pytest.mark.root
def test_a_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        options = CheckpointOptions(checkpoint_dir=disk / "c", checkpoint_every=1, keep_checkpoints=100)
        with pytest.raises(RunError, match=r"could not be written: No space left on device$"):
            train(small(num_iterations=100), checkpoints=options)
        directory = CheckpointDirectory(disk / "c", keep=1)
        done = directory.iterations()
        assert 1 < len(done) < 100
        training = Training(small(num_iterations=100))
        training.load(directory.newest())
        expected = train(small(num_iterations=done[-1]))
        assert_same_bits(named(training.layers), named(expected.layers))
        directory.lock()
        training.step()
        for iteration in done[:-1]:
            shutil.rmtree(disk / "c" / name(iteration))
        training.save(directory)
        assert directory.iterations() == [done[-1] + 1]
        directory.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_one_run_at_a_time(directory):
    other = CheckpointDirectory(directory.path)
    with pytest.raises(UsageError) as caught:
        other.lock(seconds=0.1)
    expected = f"--checkpoint-dir {str(directory.path)!r}: process {os.getpid()} writes there; wait for its end, or "
    assert str(caught.value).startswith(expected)
    other.close()  # it has nothing to give back
    with pytest.raises(UsageError, match=r"process \d+ writes there"):
        other.lock(seconds=0.1)
    directory.close()
    other.lock(seconds=0)
    publish(other, 5)
    with pytest.raises(UsageError, match="writes there"):
        directory.lock(seconds=0)
    other.close()


def test_looking_needs_no_lock(directory):
    publish(directory, 5, 5.0)
    assert value_of(CheckpointDirectory(directory.path).newest()) == 5.0


def holder(path: Path) -> int:
    """A process that holds the lock, and has an unfinished checkpoint, until it is killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            directory = CheckpointDirectory(path)
            directory.lock()
            write_payload(directory.part(10, "killed") / "rank-0.safetensors", {}, {})
            os.write(writing, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return process


def test_a_killed_run_leaves_neither_its_lock_nor_its_unfinished_checkpoint(directory):
    publish(directory, 5, 5.0)
    directory.close()
    process = holder(directory.path)
    try:
        with pytest.raises(UsageError, match=f"process {process} writes there"):
            directory.lock(seconds=0)
        assert ".part-10-killed" in names(directory.path)  # it is not ours to remove
        threading.Timer(0.2, os.kill, (process, signal.SIGKILL)).start()
        directory.lock(seconds=20)  # waits for it to die
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert names(directory.path) == [name(5), "latest", "lock"]
    assert (directory.path / "lock").read_text() == f"process {os.getpid()}\n"
    assert value_of(directory.newest()) == 5.0


def test_the_next_run_clears_up(directory):
    publish(directory, 5, 5.0)
    publish(directory, 10, 10.0)
    directory.close()
    (directory.path / ".part-15-run").mkdir()
    (directory.path / ".part-15-run" / "rank-0.safetensors").write_bytes(b"half")
    (directory.path / ".part-file").write_text("iteration-00000015\n")
    (directory.path / "latest").write_text(name(5) + "\n")  # killed between the two
    (directory.path / "notes.txt").write_text("mine")
    (directory.path / "iteration-5").mkdir()
    (directory.path / "iteration-00000099").write_text("no directory")
    directory.lock()
    assert latest(directory.path) == name(10)
    kept = ["iteration-00000099", "iteration-5", "latest", "lock", "notes.txt"]
    assert names(directory.path) == sorted([name(5), name(10), *kept])
    directory.close()
    for iteration in (5, 10):
        shutil.rmtree(directory.path / name(iteration))
    directory.lock()
    assert "latest" not in names(directory.path)
    assert directory.newest() is None


@contextlib.contextmanager
def as_an_ordinary_user():
    """Root may write anywhere, so permissions would show nothing."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_to_all():
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_a_directory_that_cannot_be_written_is_refused(open_to_all):
    (open_to_all / "file").write_text("x")
    closed = open_to_all / "closed"
    closed.mkdir()
    locked = open_to_all / "locked"
    locked.mkdir(mode=0o755)
    (locked / "lock").write_text("process 1\n")
    closed.chmod(0o555)
    (locked / "lock").chmod(0o444)
    cases = {
        open_to_all / "file": "File exists",
        open_to_all / "file" / "c": "Not a directory",
        closed: "Permission denied",
        closed / "c": "Permission denied",
        locked: "Permission denied",
        open_to_all / ("x" * 300): "File name too long",
    }
    for path, reason in cases.items():
        with as_an_ordinary_user(), pytest.raises(UsageError) as caught:
            train(small(num_iterations=1), checkpoints=CheckpointOptions(checkpoint_dir=path))
        expected = f"--checkpoint-dir {str(path)!r} cannot be written ({reason}); choose another place"
        assert str(caught.value) == expected
    closed.chmod(0o755)


def test_a_directory_in_which_only_the_lock_can_be_written(open_to_all):
    (open_to_all / "lock").touch()
    (open_to_all / "lock").chmod(0o666)
    (open_to_all / name(5)).mkdir()
    open_to_all.chmod(0o555)
    with as_an_ordinary_user(), pytest.raises((RunError, UsageError), match=r"written.*Permission denied"):
        CheckpointDirectory(open_to_all).lock()
    open_to_all.chmod(0o755)


def test_a_directory_that_goes_away_while_running(directory):
    publish(directory, 5)
    shutil.rmtree(directory.path)
    with pytest.raises(RunError, match="could not be written: No such file or directory"):
        publish(directory, 10)
    assert directory.iterations() == []


ODD = ["with a space", "ünïcödé 日本", 'quote\'s "name"', "a\nline", "-rf", "%s {x}", "iteration-00000005"]


@pytest.mark.parametrize("odd", ODD)
def test_odd_names_of_the_directory(tmp_path, odd):
    options = CheckpointOptions(checkpoint_dir=tmp_path / odd / odd)
    trained = train(small(num_iterations=2), checkpoints=options)
    training = Training(small(num_iterations=4))
    training.load(CheckpointDirectory(tmp_path / odd / odd).newest())
    assert_same_bits(named(training.layers), named(trained.layers))
    with pytest.raises(UsageError) as caught:
        train(small(num_iterations=2), checkpoints=options)
    assert "\n" not in str(caught.value)


def test_links_and_relative_names(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    for path, num_iterations in (("link", 1), ("./real", 2), ("real/../link/.", 3)):
        options = CheckpointOptions(checkpoint_dir=path, resume=True, keep_checkpoints=9)
        train(small(num_iterations=num_iterations), checkpoints=options)
    assert names(tmp_path) == ["link", "real"]
    assert (tmp_path / "link").is_symlink()
    assert CheckpointDirectory(Path("real")).iterations() == [1, 2, 3]
    one, two = CheckpointDirectory(Path("real")), CheckpointDirectory(tmp_path / "link")
    one.lock()
    with pytest.raises(UsageError, match="writes there"):
        two.lock(seconds=0)
    one.close()


def test_every_flipped_byte_of_the_manifest_is_refused(directory):
    publish(directory, 5)
    path = directory.path / name(5) / MANIFEST
    good, fields = path.read_bytes(), json.loads(path.read_bytes())
    refused = 0
    for place in range(len(good)):
        for mask in (0x01, 0x20):
            flipped = good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :]
            path.write_bytes(flipped)
            try:
                found = directory.newest()
            except PayloadError as error:
                refused += 1
                text = str(error)
                assert text.startswith(f"checkpoint {str(path)!r} is damaged: ")
                assert text.endswith(f"; remove {str(path.parent)!r} to go on from the one before")
                assert "\n" not in text
            else:
                # White space, and nothing else, says nothing.
                assert json.loads(flipped) == fields
                assert {good[place], flipped[place]} <= {*b" \n\r\t"} | {good[place] ^ mask}
                assert {**found.manifest, "sha256": fields["sha256"]} == fields
    assert refused > 1.5 * len(good)
    path.write_bytes(good)
    assert directory.newest().iteration == 5


def resigned(change) -> bytes:
    """A manifest that was changed by somebody who knows how to make its checksum right."""

    def make(good: bytes) -> bytes:
        fields = json.loads(good)
        fields.pop("sha256")
        change(fields)
        return module._json({"sha256": module._digest(fields), **fields})

    return make


BAD_MANIFESTS = {
    "empty": (lambda good: b"", "is damaged"),
    "half": (lambda good: good[: len(good) // 2], "is damaged"),
    "no object": (lambda good: b"[1, 2]", "is damaged"),
    "a number": (lambda good: b"3", "is damaged"),
    "no text": (lambda good: b"\xff\xfe" + good, "is damaged"),
    "too deep": (lambda good: b'{"a":' * 100_000, "is damaged"),
    "a pickle": (lambda good: b"\x80\x04K\x01.", "is damaged"),
    "no checksum": (lambda good: good.replace(b'"sha256"', b'"sha257"', 1), "is damaged"),
    "another version": (resigned(lambda f: f.update(version=2)), "it has version 2, and this program reads version 1"),
    "another iteration": (resigned(lambda f: f.update(iteration=6)), "it is of iteration 6"),
    "a path": (resigned(lambda f: f["files"].update({"../rank-0.safetensors": {}})), "files that are no part of a "),
    "files as a number": (resigned(lambda f: f.update(files=3)), "is damaged"),
    "files as a list": (resigned(lambda f: f.update(files=[[]])), "is damaged"),
    "no files": (resigned(lambda f: f.pop("files")), "it has no list of files"),
    "no config": (resigned(lambda f: f.pop("config")), "it has no config"),
    "a config as text": (resigned(lambda f: f.update(config="x")), "it has no config"),
    "ranks as text": (resigned(lambda f: f.update(num_ranks="2")), "it has no number of ranks"),
    "a file without a size": (resigned(lambda f: next(iter(f["files"].values())).pop("bytes")), "cannot be read"),
    "a file as a number": (resigned(lambda f: f["files"].update({"rank-0.safetensors": 3})), "cannot be read"),
    "layers as lists": (resigned(lambda f: next(iter(f["files"].values())).update(layers=[[0]])), "are not numbers"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(directory, case):
    make, message = BAD_MANIFESTS[case]
    publish(directory, 5)
    path = directory.path / name(5) / MANIFEST
    path.write_bytes(make(path.read_bytes()))
    with pytest.raises(PayloadError, match=message) as caught:
        directory.newest()
    assert str(caught.value).endswith(f"; remove {str(path.parent)!r} to go on from the one before")
    assert "\n" not in str(caught.value)


def test_a_missing_manifest_is_refused(directory):
    publish(directory, 5, 5.0)
    publish(directory, 10)
    path = directory.path / name(10)
    (path / MANIFEST).unlink()
    with pytest.raises(PayloadError, match=rf"{MANIFEST}' cannot be read: No such file or directory; remove '{path}'"):
        directory.newest()
    shutil.rmtree(path)  # as it says
    assert value_of(directory.newest()) == 5.0
    with pytest.raises(PayloadError, match="cannot be read"):
        directory.at(10)


def test_a_damaged_file_is_refused_with_the_way_out(directory):
    publish(directory, 5, 5.0)
    publish(directory, 10, 10.0)
    newest = directory.newest()
    file = newest.path / "rank-1.safetensors"
    good, older = file.read_bytes(), (directory.path / name(5) / file.name).read_bytes()
    other_run = CheckpointDirectory(directory.path / "other run")
    other_run.path.mkdir()
    publish(other_run, 10, 11.0)
    another = (other_run.newest().path / file.name).read_bytes()
    assert len(another) == len(good)
    cases = {
        "flipped": (good[:-1] + bytes([good[-1] ^ 1]), "is damaged: its checksum does not match its bytes"),
        "cut short": (good[:-7], f"has {len(good) - 7} bytes, and {len(good)} were saved"),
        "appended": (good + b"x", f"has {len(good) + 1} bytes, and {len(good)} were saved"),
        "empty": (b"", f"has 0 bytes, and {len(good)} were saved"),
        "zeros": (bytes(len(good)), "is no safetensors file"),
        "an older one's": (older, f"has {len(older)} bytes, and {len(good)} were saved"),
        "another run's": (another, "is not the file that was saved there"),
        "another rank's": ((newest.path / "rank-0.safetensors").read_bytes(), "is not the file that was saved there"),
    }
    for case, (data, message) in cases.items():
        file.write_bytes(data)
        with pytest.raises(PayloadError) as caught:
            newest.payloads([0, 1])
        assert f"checkpoint {str(file)!r} {message}" in str(caught.value), case
        assert str(caught.value).count(f"; remove {str(newest.path)!r} to go on from the one before") == 1, case
        assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(PayloadError, match="cannot be read: No such file"):
        newest.payloads([1])
    file.mkdir()
    with pytest.raises(PayloadError, match=r"has \d+ bytes|cannot be read: Is a directory"):
        newest.payloads([1])
    with pytest.raises(PayloadError, match=r"rank-7\.safetensors' was not saved"):
        newest.payload("rank-7.safetensors")
    assert value_of(directory.at(5)) == 5.0


def test_the_index_names_each_tensor_once(directory):
    training = train(small(num_iterations=1, optimizer="adam"))
    training.save(directory)
    path = directory.newest().path
    index = json.loads((path / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum((path / file).stat().st_size for file in files)
    text = (path / INDEX).read_text()
    assert all(text.count(f'"{tensor}"') == 1 for tensor in index["weight_map"])
    weights = {n for n in index["weight_map"] if "/" not in n}
    assert weights == named(training.layers).keys()
    assert {n for n in index["weight_map"] if "/" in n} == {
        f"optimizer/{n}/{key}" for n in weights for key in ("step", "exp_avg", "exp_avg_sq")
    }
    with safetensors.safe_open(path / FILE, "pt") as file:
        assert index["weight_map"].keys() <= set(file.keys())


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@ALONE
@pytest.mark.parametrize("num_files", [1, 3])
def test_other_tools_read_the_parameters(directory, num_files):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    publish(directory, 5, 5.0, num_files)
    loaded = {f"{i}.weight": torch.zeros(4) for i in range(num_files)}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(directory.newest().path)), no_dist=True)
    assert_same_bits(loaded, {f"{i}.weight": torch.full((4,), 5.0 + i) for i in range(num_files)})


@ALONE
def test_other_tools_read_a_run_of_ours(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    training = train(small(num_iterations=2), checkpoints=CheckpointOptions(checkpoint_dir=tmp_path))
    loaded = {n: torch.zeros_like(x) for n, x in named(training.layers).items()}
    reader = dcp.HuggingFaceStorageReader(str(CheckpointDirectory(tmp_path).newest().path))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_same_bits(loaded, named(training.layers))


def test_a_damaged_checkpoint_ends_the_run_in_one_line_and_the_one_before_can_be_taken(tmp_path):
    options = CheckpointOptions(checkpoint_dir=tmp_path, checkpoint_every=2, resume=True)
    uninterrupted = train(small(num_iterations=6))
    train(small(num_iterations=4), checkpoints=options)
    file = tmp_path / name(4) / FILE
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    with pytest.raises(RunError, match="is damaged") as caught:
        train(small(num_iterations=6), checkpoints=options)
    shutil.rmtree(re.search("remove '(.*)' to go on", str(caught.value))[1])
    resumed = train(small(num_iterations=6), checkpoints=options)
    assert resumed.losses == uninterrupted.losses
    assert_same_bits(named(resumed.layers), named(uninterrupted.layers))


@pytest.mark.slow
def test_the_program_says_in_one_line_what_is_wrong(tmp_path):
    train(small(num_iterations=2), checkpoints=CheckpointOptions(checkpoint_dir=tmp_path))
    ran = python("step0_monolith", "--num-iterations", 4, "--checkpoint-dir", tmp_path)
    assert (ran.status, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
    assert "has checkpoints up to iteration 2; add --resume" in ran.stderr
    (tmp_path / name(2) / MANIFEST).write_text("{}")
    ran = python("step0_monolith", "--num-iterations", 4, "--resume", "--checkpoint-dir", tmp_path)
    assert (ran.status, ran.stdout, len(ran.stderr.splitlines())) == (1, "", 1)
    assert "is damaged" in ran.stderr
    ran = run_command(["bash", "-c", f"ulimit -f 1; {shlex.quote(sys.executable)} -m step0_monolith --num-iterations 2 "
                       f"--checkpoint-dir {shlex.quote(str(tmp_path / 'small'))}"])  # fmt: skip
    assert (ran.status, len(ran.stderr.splitlines())) == (1, 1)
    assert "could not be written: File too large" in ran.stderr


def test_names_that_are_no_checkpoints_are_left_alone(directory):
    publish(directory, 5)
    strange = ["iteration-000000009", "iteration-9", "iteration-" + "\u0661" * 8, "iteration-abc"]
    for other in strange:
        (directory.path / other).mkdir()
    (directory.path / ".part-x-old").mkdir()
    directory.close()
    directory.lock()
    assert directory.iterations() == [5]
    publish(directory, 123456789)
    assert directory.newest().iteration == 123456789
    assert all((directory.path / other).is_dir() for other in strange)


def test_a_link_called_lock_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "lock").symlink_to(mine)
    with pytest.raises(UsageError, match="cannot be written"):
        CheckpointDirectory(tmp_path / "checkpoints").lock()
    assert mine.read_text() == "precious"
