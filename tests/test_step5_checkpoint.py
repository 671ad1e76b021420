"""Step 5: checkpoints that all ranks write together and any number of ranks takes over, with the bits of one run."""

import os
import random
import shutil
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import step5_orchestrator.checkpoint as checkpoint_module
from step0_monolith.checkpoints import CheckpointDirectory, CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.options import RunError, UsageError
from step0_monolith.result import weights_sha256
from step0_monolith.state import collect
from step0_monolith.train import Training, train
from step1_partition.stage import Stage
from step2_comms.launch import Launch
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.trainer import Trainer
from step6_schedules.schedules import SCHEDULES
from tests.monolith import assert_same_bits, joined, monolith, named, small
from tests.training import stage_class_for

SAVED, LOST, END = 5, 7, 10  # saved after 5 of 10 iterations; what came between 5 and 7 was lost with the run


@dataclass(frozen=True)
class Stretch:
    """A piece of a training: until iteration `until` (None: to its end), from what is in `folder` when it resumes."""

    config: Config
    folder: Path | None
    schedule: str = "1f1b"
    until: int | None = None
    resume: bool = False
    every: int = SAVED
    keep: int = 2
    data_parallel: int = 1

    def options(self) -> CheckpointOptions:
        if self.folder is None:
            return CheckpointOptions()
        return CheckpointOptions(
            checkpoint_dir=self.folder, checkpoint_every=self.every, keep_checkpoints=self.keep, resume=self.resume
        )


@dataclass
class Done:
    """What one rank did in a stretch. first: iterations that were done before it."""

    first: int
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    weights_sha256: str | None


def launch_of(world) -> Launch:
    return Launch(world.rank, world.size, world.rank, world.size)


def trainer_of(world, stretch: Stretch, stage_class: type[Stage] | None = None) -> Trainer:
    replicas = stretch.data_parallel
    table = SCHEDULES[stretch.schedule](world.size // replicas, stretch.config.num_microbatches)
    stage_class = stage_class or stage_class_for(table)
    return Trainer(stretch.config, world, table, stage_class=stage_class, data_parallel=replicas)


def run_stretch(world, stretch: Stretch, stage_class: type[Stage] | None = None, each=lambda world, trainer: None):
    """each: called after every iteration."""
    with Checkpoints(stretch.options(), stretch.config, launch_of(world)) as checkpoints:
        trainer = trainer_of(world, stretch, stage_class)
        checkpoints.start(trainer)
        first = trainer.iteration
        while trainer.iteration < (stretch.until or stretch.config.num_iterations):
            trainer.step()
            checkpoints.after_iteration(trainer)
            each(world, trainer)
        checkpoints.finish(world)
        result = trainer.result()
        trainer.close()
    stages = trainer.pipeline.stages.values()
    own = joined([named(stage.modules, stage.first_layer) for stage in stages])
    return Done(first, trainer.losses, own, result.weights_sha256 if result else None)


def run_stretches(world, stretches: list[Stretch]) -> list[Done]:
    return [run_stretch(world, stretch) for stretch in stretches]


def assert_one_long_run(ranks: list[Done], config: Config, first: int = SAVED) -> None:
    """Every loss, all final weights and their hash have the bits of the monolith, which nobody interrupted."""
    expected = monolith(config)
    for rank in ranks:
        assert rank.first == first
        assert rank.losses == expected.losses
    assert_same_bits(joined([rank.parameters for rank in ranks]), expected.parameters)
    assert ranks[0].weights_sha256 == expected.weights_sha256


def run_monolith(config: Config, folder: Path, until: int | None = None) -> Training:
    """Takes over what is in the folder, or starts there; until: iterations after which the run is lost."""
    if until is None:
        options = CheckpointOptions(checkpoint_dir=folder, checkpoint_every=SAVED, resume=True)
        return train(config, checkpoints=options)
    directory, training = CheckpointDirectory(folder), Training(config)
    directory.lock()
    while len(training.losses) < until:
        training.step()
        if len(training.losses) % SAVED == 0:
            training.save(directory)
    directory.close()
    return training


def assert_monolith_goes_on(config: Config, folder: Path) -> None:
    finished = run_monolith(config, folder)
    assert finished.losses == monolith(config).losses
    assert weights_sha256(finished.parameters) == monolith(config).weights_sha256


def longer(**changes) -> Config:
    return small(**{"num_iterations": END, **changes})


CONFIGS = [
    longer(),
    longer(optimizer="adam", dtype="bfloat16", max_grad_norm=0.5),
    longer(optimizer="adam", dtype="float64", lr_schedule="warmup-cosine", warmup_iterations=7, max_grad_norm=1.0),
    longer(optimizer="adam", accumulate=5),
    longer(dtype="bfloat16", accumulate=5, lr_schedule="warmup-cosine", warmup_iterations=5),
    longer(dtype="float64", max_grad_norm=2.0, num_microbatches=3),
]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


# At any number of ranks


def test_saved_on_2_ranks_goes_on_at_1_3_and_4_with_the_same_bits(pool, tmp_path):
    configs = CONFIGS[:4]
    folders = [tmp_path / f"saved {i}" for i in range(len(configs))]
    pool.run(2, run_stretches, [Stretch(c, f, until=LOST) for c, f in zip(configs, folders, strict=True)])
    for num_ranks, schedule in ((1, "gpipe"), (3, "zb-h1"), (4, "interleaved")):
        stretches = [
            Stretch(config, copied(folder, tmp_path / f"{num_ranks} ranks {i}"), schedule, resume=True)
            for i, (config, folder) in enumerate(zip(configs, folders, strict=True))
        ]
        for config, *ranks in zip(configs, *pool.run(num_ranks, run_stretches, stretches), strict=True):
            assert_one_long_run(ranks, config)


def test_the_monoliths_checkpoint_and_the_pipelines_are_the_same(pool, tmp_path):
    configs = CONFIGS[2:4]
    there = [Stretch(c, tmp_path / f"monolith {i}", "zb-v", resume=True) for i, c in enumerate(configs)]
    back = [Stretch(c, tmp_path / f"pipeline {i}", "bfs", until=LOST) for i, c in enumerate(configs)]
    for stretch in there:
        run_monolith(stretch.config, stretch.folder, until=LOST)
    results = pool.run(3, run_stretches, [*there, *back])
    for config, *ranks in zip(configs, *(result[: len(there)] for result in results), strict=True):
        assert_one_long_run(ranks, config)
    for stretch in back:
        assert_monolith_goes_on(stretch.config, stretch.folder)


COUNTS = (1, 2, 3, 4, 8)
MANY = [replace(c, num_layers=16, batch_size=35, num_microbatches=16) for c in CONFIGS]  # enough for all of them


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_any_number_of_ranks_and_schedule_goes_on_from_any_other(pool, tmp_path):
    names, seen = list(SCHEDULES), set()
    saved = [
        [
            Stretch(config, tmp_path / f"{num_ranks} {j}", names[(2 * i + j) % len(names)], until=LOST)
            for j, config in enumerate(MANY)
        ]
        for i, num_ranks in enumerate(COUNTS)
    ]
    for num_ranks, stretches in zip(COUNTS, saved, strict=True):
        pool.run(num_ranks, run_stretches, stretches)
    for i, num_ranks in enumerate(COUNTS):
        stretches = []
        for j, before in enumerate(COUNTS):
            stretch = saved[j][(i + j) % len(MANY)]
            folder = copied(stretch.folder, tmp_path / f"{before} to {num_ranks}")
            schedule = names[(i + 2 * j) % len(names)]
            stretches.append(replace(stretch, folder=folder, schedule=schedule, until=None, resume=True))
            seen.add(schedule)
        for stretch, *ranks in zip(stretches, *pool.run(num_ranks, run_stretches, stretches), strict=True):
            assert_one_long_run(ranks, stretch.config)
    assert seen == set(SCHEDULES)


def test_a_resumed_run_is_saved_and_resumed_again(pool, tmp_path):
    config, folder = longer(optimizer="adam", num_iterations=12), tmp_path / "c"
    pool.run(3, run_stretch, Stretch(config, folder, "zb-h2", until=4, every=2))
    (ranks,) = zip(*pool.run(2, run_stretches, [Stretch(config, folder, until=9, every=4, resume=True)]), strict=True)
    assert [rank.first for rank in ranks] == [4, 4]
    stretches = [Stretch(config, folder, "gpipe", resume=True)] * 2  # the second finds it finished
    for first, *ranks in zip((8, 12), *pool.run(2, run_stretches, stretches), strict=True):
        assert_one_long_run(ranks, config, first)


# Replicas


def assert_close(ranks: list[Done], config: Config, num_ranks: int) -> None:
    """Of one replica's ranks, to 1e-12 relative."""
    expected = monolith(config)
    for rank in ranks:
        assert rank.first == SAVED
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)
    found = joined([rank.parameters for rank in ranks[:num_ranks]])
    assert found.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max(), name
    for first in range(num_ranks, len(ranks), num_ranks):
        assert_same_bits(joined([rank.parameters for rank in ranks[first : first + num_ranks]]), found)


def test_replicas_that_come_or_go_at_a_checkpoint(pool, tmp_path):
    config = longer(dtype="float64", optimizer="adam", max_grad_norm=1.0, num_microbatches=3)
    one = Stretch(config, tmp_path / "one", until=LOST)
    two = Stretch(config, tmp_path / "two", "gpipe", data_parallel=2, until=LOST)
    undisturbed = replace(two, folder=None, until=None)
    pool.run(2, run_stretch, one)
    more, _, through = zip(
        *pool.run(4, run_stretches, [replace(one, data_parallel=2, until=None, resume=True), two, undisturbed]),
        strict=True,
    )
    assert_close(more, config, 2)
    manifest = CheckpointDirectory(two.folder).newest().manifest
    assert (manifest["num_ranks"], manifest["data_parallel"], len(manifest["files"])) == (4, 2, 4)
    saved = [layer for entry in manifest["files"].values() for layer in entry["layers"]]
    assert sorted(saved) == list(range(config.num_layers))  # by one replica alone

    # With as many replicas as before, the same bits; with one, close.
    again = replace(two, folder=copied(two.folder, tmp_path / "again"), until=None, resume=True)
    for before, rank in zip(through, pool.run(4, run_stretch, again), strict=True):
        assert (rank.first, rank.losses, rank.weights_sha256) == (SAVED, before.losses, before.weights_sha256)
        assert_same_bits(rank.parameters, before.parameters)
    assert_close(pool.run(3, run_stretch, replace(two, data_parallel=1, until=None, resume=True)), config, 3)


# Random numbers


class NoisyStage(Stage):
    """Its first layer draws from the global generators of torch and of Python, as a module of a user's own may."""

    def __init__(self, modules, first_layer=0):
        super().__init__(modules, first_layer)
        self.modules[0].register_forward_pre_hook(self.noise)

    @staticmethod
    def noise(module, inputs):
        return (inputs[0] * (0.5 + torch.rand(inputs[0].shape) + random.random()),)


def noisy(world, folder: Path) -> list[Done]:
    """An undisturbed run, one that is lost, and one that takes it over with the generators elsewhere at its start."""
    found = []
    before = random.getstate(), torch.get_rng_state()
    stretches = [Stretch(longer(), None), Stretch(longer(), folder, until=LOST), Stretch(longer(), folder, resume=True)]
    for seed, stretch in zip((1, 1, 2), stretches, strict=True):
        torch.manual_seed(seed * 10 + world.rank)
        random.seed(seed * 10 + world.rank)
        found.append(run_stretch(world, stretch, NoisyStage))
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    return found


def test_random_numbers_go_on_where_they_were_on_each_rank(pool, tmp_path):
    for undisturbed, lost, resumed in pool.run(3, noisy, tmp_path / "c"):
        assert resumed.first == SAVED
        assert lost.losses == undisturbed.losses[:LOST]
        assert resumed.losses == undisturbed.losses
        assert_same_bits(resumed.parameters, undisturbed.parameters)
    assert undisturbed.losses != monolith(longer()).losses


# What is in the directory


def test_the_newest_stay_and_latest_names_one(pool, tmp_path):
    def names(folder):
        return sorted(path.name for path in folder.iterdir())

    stretches = [Stretch(longer(), tmp_path / str(keep), every=3, keep=keep) for keep in (1, 3)]
    pool.run(2, run_stretches, stretches)
    assert names(tmp_path / "1") == ["iteration-00000010", "latest", "lock"]
    assert names(tmp_path / "3") == [*(f"iteration-{i:08d}" for i in (6, 9, 10)), "latest", "lock"]
    for stretch in stretches:
        assert (stretch.folder / "latest").read_text() == "iteration-00000010\n"
    files = ["checkpoint.json", "model.safetensors.index.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert names(tmp_path / "1" / "iteration-00000010") == files
    finished = CheckpointDirectory(tmp_path / "1").newest()
    assert (finished.manifest["num_ranks"], finished.manifest["schedule"]) == (2, "1f1b")


def test_what_a_crash_left_behind_is_ignored_and_cleared_away(pool, tmp_path):
    config, folder = longer(optimizer="adam"), tmp_path / "c"
    pool.run(2, run_stretch, Stretch(config, folder, until=LOST))
    unfinished = copied(folder / "iteration-00000005", folder / ".part-10-0123456789ab")
    (unfinished / "checkpoint.json").unlink()
    (unfinished / "rank-1.safetensors").write_bytes(b"half")
    (folder / ".part-half.txt").write_text("iteration-000000")
    (folder / "latest").write_text("iteration-00000010\n")  # it was going to be there
    assert_one_long_run(pool.run(3, run_stretch, Stretch(config, folder, resume=True)), config)
    assert sorted(p.name for p in folder.iterdir()) == [*(f"iteration-{i:08d}" for i in (5, 10)), "latest", "lock"]


class Later:
    """A file of iteration `at` is written only when `may_go` says so."""

    def __init__(self, at: int, may_go) -> None:
        self.at, self.may_go, self.write = at, may_go, checkpoint_module.write_payload

    def __enter__(self) -> None:
        checkpoint_module.write_payload = self.wait_and_write

    def __exit__(self, *error) -> None:
        checkpoint_module.write_payload = self.write

    def wait_and_write(self, path, tensors, scalars):
        deadline = time.monotonic() + 20
        while f".part-{self.at}-" in str(path) and not self.may_go() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.write(path, tensors, scalars)


def save_beside_training(world, stretch: Stretch) -> int:
    """No rank writes before it has done three more iterations. Returns iterations whose checkpoint was seen before."""
    seen = []
    with Later(SAVED, lambda: len(seen) >= 3):

        def look(world, trainer):
            if trainer.iteration > SAVED:
                seen.append(CheckpointDirectory(stretch.folder).iterations())

        run_stretch(world, stretch, each=look)
    return seen


def test_a_snapshot_does_not_change_while_training_goes_on(pool, tmp_path):
    config, folder = longer(optimizer="adam", max_grad_norm=1.0), tmp_path / "c"
    for seen in pool.run(2, save_beside_training, Stretch(config, folder, until=SAVED + 3)):
        assert len(seen) == 3  # else it waited for the file
        assert seen[:2] == [[], []]
    loaded = Training(config)
    loaded.load(CheckpointDirectory(folder).newest())
    expected = train(replace(config, num_iterations=SAVED))
    assert loaded.losses == expected.losses
    assert_same_bits(named(loaded.layers), named(expected.layers))
    states = [collect(dict(enumerate(t.layers)), t.optimizer).tensors for t in (loaded, expected)]
    assert_same_bits(*states)
    assert_monolith_goes_on(config, folder)


def one_rank_is_late(world, stretch: Stretch) -> list[int]:
    """The last rank writes when rank 0 has looked into the directory for a while. Returns what rank 0 saw there."""
    directory, seen = CheckpointDirectory(stretch.folder), []
    is_late = world.rank == world.size - 1
    store = world.store.clone()  # the thread's own

    def look(world, trainer):
        if world.rank == 0 and trainer.iteration == SAVED + 1:
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                seen.extend(directory.iterations())
                time.sleep(0.01)
            store.set("looked", "")

    with Later(SAVED, lambda: not is_late or store.check(["looked"])):
        run_stretch(world, stretch, each=look)
    return seen


def test_nothing_is_visible_before_all_ranks_have_written(pool, tmp_path):
    stretch = Stretch(longer(), tmp_path / "c", until=LOST)
    assert pool.run(3, one_rank_is_late, stretch) == [[], [], []]
    newest = CheckpointDirectory(stretch.folder).newest()
    assert newest.iteration == SAVED
    assert [len(newest.payload(f"rank-{rank}.safetensors").tensors) > 1 for rank in range(3)] == [True] * 3


def ends_while_saving(world, stretch: Stretch) -> list[str]:
    """Rank 1's disk is slow, and the run fails before it has written. Returns the threads that are left here."""

    def fail(world, trainer):
        if trainer.iteration == SAVED:
            raise RunError("planted")

    over = threading.Event()
    threading.Timer(0.5, over.set).start()
    with Later(SAVED, lambda: world.rank == 0 or over.is_set()), pytest.raises(RunError, match="planted"):
        run_stretch(world, stretch, each=fail)
    return [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_no_thread_is_left_when_a_run_fails_while_it_saves(pool, tmp_path):
    """A thread that asks the store while Python ends takes the process down: "terminate called", status 134."""
    assert pool.run(2, ends_while_saving, Stretch(longer(data="random"), tmp_path / "c")) == [[], []]
    assert CheckpointDirectory(tmp_path / "c").iterations() == []


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 17}, "--width 17, but checkpoint .* was saved with 16; say --width 16, or choose another"),
        ({"optimizer": "adam"}, "--optimizer adam, but checkpoint .* was saved with sgd"),
        ({"batch_size": 14}, "--batch-size 14, but checkpoint .* was saved with 13"),
        ({"num_iterations": 4}, "--num-iterations 4, but checkpoint .* has done 5 already; say more"),
        ({"resume": False}, "has checkpoints up to iteration 5; add --resume"),
        ({"accumulate": 2, "num_iterations": 10}, "--checkpoint-every 5 is not a multiple of --accumulate 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_group_opens(tmp_path, changes, message):
    run_monolith(longer(), tmp_path, until=LOST)
    stretch = Stretch(longer(**{k: v for k, v in changes.items() if k != "resume"}), tmp_path, resume=True)
    stretch = replace(stretch, resume=changes.get("resume", True))
    with pytest.raises(UsageError, match=message):
        Checkpoints(stretch.options(), stretch.config, Launch(0, 2, 0, 2))
    # The lock is free again.
    with Checkpoints(Stretch(longer(), tmp_path, resume=True).options(), longer(), Launch(0, 2, 0, 2)):
        pass


def test_two_runs_in_one_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointDirectory.lock, "__defaults__", (0.1,))
    options = Stretch(longer(), tmp_path, resume=True).options()
    with Checkpoints(options, longer(), Launch(0, 2, 0, 2)):
        with Checkpoints(options, longer(), Launch(1, 2, 1, 2)):  # of the same run: only rank 0 locks
            pass
        with pytest.raises(UsageError, match=f"process {os.getpid()} writes there; wait for its end, or choose"):
            Checkpoints(options, longer(), Launch(0, 2, 0, 2))
    with Checkpoints(options, longer(), Launch(0, 2, 0, 2)):
        pass


def test_what_else_changed_is_said_when_a_run_goes_on(tmp_path):
    run_monolith(longer(), tmp_path, until=LOST)

    def said(**changes):
        with Checkpoints(
            Stretch(longer(), tmp_path, resume=True).options(), longer(**changes), Launch(0, 1, 0, 1)
        ) as c:
            return c._say.splitlines()

    first = f"resuming after iteration 5 from {str(tmp_path / 'iteration-00000005')!r}"
    assert said() == [first]
    assert said(learning_rate=0.2, num_iterations=12) == [
        first, "--num-iterations is now 12, it was 10", "--learning-rate is now 0.2, it was 0.1"
    ]  # fmt: skip


# Ranks that end in an error: last, since the pool needs new processes afterwards


def disk_full(world, stretch: Stretch, full_rank: int, at: int) -> None:
    """The disk of one rank takes no more of the checkpoint of iteration `at`."""
    write, fsync = checkpoint_module.write_payload, os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    def written(path, tensors, scalars):
        os.fsync = full if f".part-{at}-" in str(path) and world.rank == full_rank else fsync
        try:
            return write(path, tensors, scalars)
        finally:
            os.fsync = fsync

    checkpoint_module.write_payload = written
    try:
        run_stretch(world, stretch)
    finally:
        checkpoint_module.write_payload = write


FULL = [
    pytest.param(1, 6, id="rank 1 in the middle"),
    pytest.param(2, END, id="rank 2 at the end", marks=pytest.mark.slow),
    pytest.param(0, 6, id="rank 0 in the middle", marks=pytest.mark.slow),
    pytest.param(0, END, id="rank 0 at the end", marks=pytest.mark.slow),
    pytest.param(2, 6, id="rank 2 in the middle", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rank", "at"), FULL)
def test_a_disk_that_is_full_on_one_rank_ends_all_and_the_older_one_loads(pool, tmp_path, rank, at):
    stretch = Stretch(longer(data="random"), tmp_path / "c", every=3)
    outcomes = pool.outcomes(3, disk_full, stretch, rank, at, timeout=10, limit=20)
    for outcome in outcomes:
        assert outcome.error.startswith("RunError: "), outcome.traceback
        assert f"rank-{rank}.safetensors' could not be written: No space left on device" in outcome.error
    assert CheckpointDirectory(stretch.folder).iterations()[-1] == {6: 3, END: 9}[at]
    assert_monolith_goes_on(stretch.config, stretch.folder)


def flip(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    return "is damaged: its checksum does not match its bytes"


def cut(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "bytes, and"


def remove(path: Path) -> str:
    path.unlink()
    return "cannot be read: No such file or directory"


def swap(path: Path) -> str:
    """Whole, but of an earlier iteration."""
    shutil.copy(path.parent.parent / "iteration-00000003" / path.name, path)
    return ""


@pytest.mark.parametrize("damage", [flip, *(pytest.param(way, marks=pytest.mark.slow) for way in (cut, remove, swap))])
@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_damaged_file_ends_all_ranks_and_the_one_before_loads(pool, tmp_path, damage, num_ranks):
    config, folder = longer(optimizer="adam", data="random"), tmp_path / "c"
    pool.run(3, run_stretch, Stretch(config, folder, until=LOST, every=3))
    newest = folder / "iteration-00000006"
    file = newest / "rank-1.safetensors"
    what = damage(file)
    outcomes = pool.outcomes(num_ranks, run_stretch, Stretch(config, folder, resume=True), timeout=10, limit=20)
    for outcome in outcomes:
        assert outcome.error, outcome.value
        assert str(file) in outcome.error, outcome.traceback
        assert what in outcome.error
    assert any(f"remove {str(newest)!r} to go on from the one before" in outcome.error for outcome in outcomes)
    shutil.rmtree(newest)
    assert_monolith_goes_on(config, folder)


def never_writes(world, stretch: Stretch) -> None:
    """The disk of rank 1 hangs at the last checkpoint. The timeout is short from there on only: ranks start slowly."""

    def shorten(world, trainer):
        if trainer.iteration == LOST:
            world.timeout = timedelta(seconds=2)
            if world.rank == 1:
                checkpoint_module.write_payload = lambda *arguments: time.sleep(6)  # this process ends with the test

    run_stretch(world, stretch, each=shorten)


@pytest.mark.slow
def test_a_rank_that_does_not_write_in_time_is_named(pool, tmp_path):
    outcomes = pool.outcomes(3, never_writes, Stretch(longer(data="random"), tmp_path / "c"), limit=40)
    assert outcomes[0].error.startswith("RunError: rank 1 did not write its part of "), outcomes[0].traceback
    assert all(outcome.error for outcome in outcomes)
    assert CheckpointDirectory(tmp_path / "c").iterations() == [SAVED]
