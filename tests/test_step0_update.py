"""Step 0: going on from a checkpoint, gradients over several iterations, and numbers that are not finite."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import sys

import pytest
import torch

from step0_monolith import train as module
from step0_monolith.__main__ import main
from step0_monolith.checkpoints import CheckpointDirectory, CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers
from step0_monolith.options import RunError, UsageError, run_program
from step0_monolith.payload import Payload, PayloadError
from step0_monolith.reference import forward_backward
from step0_monolith.result import read_result, weights_sha256
from step0_monolith.resume import MUST_AGREE, random_state, restore_random_state
from step0_monolith.state import collect
from step0_monolith.train import Training, train
from step0_monolith.update import (
    are_finite,
    learning_rate,
    make_optimizer,
    norm_of,
    not_finite,
    squared_norms,
    update_weights,
)
from tests.monolith import assert_same_bits, named, small
from tests.ranks import python


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """Which takes most of a small checkpoint's time; tests/test_step0_checkpoints.py sees to it."""
    monkeypatch.setattr(os, "fsync", os.fstat)


def saving(path, every: int | None = None, resume: bool = False, keep: int = 2) -> CheckpointOptions:
    return CheckpointOptions(checkpoint_dir=path, checkpoint_every=every, resume=resume, keep_checkpoints=keep)


def assert_same_training(found: Training, expected: Training) -> None:
    """The same losses in all iterations, and the same bits in all that a checkpoint would hold."""
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=0, nan_ok=True)
    assert len(found.history.iteration_seconds) == len(expected.losses) == expected.config.num_iterations
    assert weights_sha256(found.parameters) == weights_sha256(expected.parameters)
    assert found.updates == expected.updates
    assert_same_bits(everything(found), everything(expected))


def everything(training: Training) -> dict[str, torch.Tensor]:
    return collect(dict(enumerate(training.layers)), training.optimizer).tensors


class Killed(BaseException):
    """Stands for a run that ends in the middle."""


def train_until(monkeypatch, config: Config, iteration: int, options: CheckpointOptions) -> None:
    """The run of a config, killed as soon as it has done so many iterations."""
    original = Training.step

    def step(self):
        if len(self.losses) == iteration:
            raise Killed
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step)
        with pytest.raises(Killed):
            train(config, checkpoints=options)


RESUMED = [
    {},
    {"optimizer": "adam"},
    {"dtype": "bfloat16", "optimizer": "adam"},
    {"dtype": "float64"},
    {"max_grad_norm": 0.5},
    {"lr_schedule": "warmup-cosine", "warmup_iterations": 6},
    {"lr_schedule": "warmup-cosine", "optimizer": "adam", "max_grad_norm": 1.0},
    {"accumulate": 5, "max_grad_norm": 0.5, "lr_schedule": "warmup-cosine", "warmup_iterations": 5},
    {"data": "random"},
    {"batch_size": 240, "optimizer": "adam"},  # 5 iterations an epoch
    {"batch_size": 359, "num_microbatches": 5},  # 4 iterations an epoch
]


@pytest.mark.parametrize("change", RESUMED, ids=str)
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, change, capsys):
    config = small(num_iterations=10, **change)
    uninterrupted = train(config)
    train_until(monkeypatch, config, 7, saving(tmp_path, 5))
    assert CheckpointDirectory(tmp_path).iterations() == [5]
    resumed = train(config, checkpoints=saving(tmp_path, 5, resume=True))
    assert capsys.readouterr().out == f"resuming after iteration 5 from '{tmp_path}/iteration-00000005'\n"
    assert_same_training(resumed, uninterrupted)
    assert resumed.losses[5:] != resumed.losses[:5]
    assert CheckpointDirectory(tmp_path).iterations() == [5, 10]


@pytest.mark.parametrize(
    "where", [1, 4, pytest.param(2, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_killed_again_and_again(tmp_path, monkeypatch, where):
    config = small(num_iterations=10, optimizer="adam", lr_schedule="warmup-cosine", max_grad_norm=1.0)
    for iteration in range(where, 10, where):
        train_until(monkeypatch, config, iteration, saving(tmp_path, 1, resume=True, keep=1))
        assert CheckpointDirectory(tmp_path).iterations() == [iteration]
    assert_same_training(train(config, checkpoints=saving(tmp_path, resume=True)), train(config))


def test_training_in_pieces_is_training_at_once(tmp_path, capsys):
    for num_iterations in (3, 3, 7, 10):
        piece = train(small(num_iterations=num_iterations), checkpoints=saving(tmp_path, resume=True))
        assert len(piece.losses) == num_iterations
    assert_same_training(piece, train(small(num_iterations=10)))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"no checkpoint in '{tmp_path}' yet: starting with iteration 1"
    assert said[1] == f"resuming after iteration 3 from '{tmp_path}/iteration-00000003'"
    assert said[2] == "nothing is left to train; to go on, raise --num-iterations"
    assert said[3:5] == [said[1], "--num-iterations is now 7, it was 3"]
    assert said[5:] == [
        f"resuming after iteration 7 from '{tmp_path}/iteration-00000007'", "--num-iterations is now 10, it was 7"
    ]  # fmt: skip


def test_saving_changes_nothing(tmp_path):
    config = small(num_iterations=6, optimizer="adam")
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()
    assert_same_training(train(config, checkpoints=saving(tmp_path, 1)), train(config))
    assert (torch.equal(torch.get_rng_state(), before[0]), random.getstate()) == (True, before[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints of iterations 5 and 10."""
    path = tmp_path_factory.mktemp("saved")
    train(small(num_iterations=10), checkpoints=saving(path, 5))
    return path


CHANGED = {
    "num_layers": 10, "width": 8, "dtype": "float64", "optimizer": "adam", "seed": 1, "data": "random",
    "batch_size": 12, "accumulate": 2,
}  # fmt: skip
ALLOWED = {
    "num_microbatches": 2, "num_iterations": 20, "learning_rate": 0.05, "lr_schedule": "warmup-cosine",
    "max_grad_norm": 0.5, "on_nonfinite": "skip", "threads": 2,
}  # fmt: skip


def test_every_field_of_the_config_is_said_to_agree_or_may_change():
    assert {*CHANGED} == {*MUST_AGREE}
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields == {*MUST_AGREE} | {*ALLOWED} | {"warmup_iterations"}


@pytest.mark.parametrize("field", CHANGED)
def test_another_model_or_other_data_is_refused_by_name(saved, field):
    before = sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*.*"))
    value, old = CHANGED[field], getattr(small(), field)
    with pytest.raises(UsageError) as caught:
        train(small(num_iterations=20, **{field: value}), checkpoints=saving(saved, resume=True))
    flag = "--" + field.replace("_", "-")
    assert str(caught.value) == (
        f"{flag} {value}, but checkpoint '{saved}/iteration-00000010' was saved with {old}; say {flag} {old}, or "
        f"choose another --checkpoint-dir"
    )
    assert sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*.*")) == before


@pytest.mark.parametrize("field", ALLOWED)
def test_other_changes_are_allowed_and_said(saved, tmp_path, field, capsys):
    shutil.copytree(saved, tmp_path / "copy")
    changes = {"num_iterations": 10, field: ALLOWED[field]}
    try:
        resumed = train(small(**changes), checkpoints=saving(tmp_path / "copy", resume=True))
    finally:
        torch.set_num_threads(1)
    said = capsys.readouterr().out.splitlines()[1:]
    old = 10 if field == "num_iterations" else getattr(small(), field)
    if changes["num_iterations"] == 10:
        assert said.pop() == "nothing is left to train; to go on, raise --num-iterations"
    assert said == [f"--{field.replace('_', '-')} is now {ALLOWED[field]}, it was {old}"]
    assert len(resumed.losses) == changes["num_iterations"]


def test_a_changed_step_size_is_used(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    config = small(num_iterations=11, learning_rate=0.5)
    resumed = train(config, checkpoints=saving(tmp_path / "copy", resume=True))
    expected = train(small(num_iterations=10))
    expected.config = config
    expected.step()
    assert_same_bits(named(resumed.layers), named(expected.layers))


def test_starts_that_would_lose_something_are_refused(saved, tmp_path):
    with pytest.raises(UsageError) as caught:
        train(small(num_iterations=10), checkpoints=saving(saved))
    assert str(caught.value) == (
        f"--checkpoint-dir '{saved}' has checkpoints up to iteration 10; add --resume to go on from there, or choose "
        f"another directory"
    )
    with pytest.raises(UsageError) as caught:
        train(small(num_iterations=9), checkpoints=saving(saved, resume=True))
    assert str(caught.value) == (
        f"--num-iterations 9, but checkpoint '{saved}/iteration-00000010' has done 10 already; say more"
    )
    with pytest.raises(UsageError) as caught:
        train(small(num_iterations=12, accumulate=4), checkpoints=saving(tmp_path / "new", 6))
    assert str(caught.value) == (
        "--checkpoint-every 6 is not a multiple of --accumulate 4: gradients between two updates are not saved"
    )
    # The lock is free again after a refusal.
    CheckpointDirectory(saved).lock(seconds=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint-dir"),
        ({"resume": True}, "--resume needs --checkpoint-dir"),
        ({"checkpoint_dir": "x", "checkpoint_every": 0}, "--checkpoint-every must be at least 1, not 0"),
        ({"checkpoint_dir": "x", "checkpoint_every": "often"}, "--checkpoint-every must be a whole number"),
        ({"checkpoint_dir": "x", "keep_checkpoints": 0}, "--keep-checkpoints must be at least 1, not 0"),
        ({"checkpoint_dir": ""}, "--checkpoint-dir '' is no name of a directory"),
        ({"checkpoint_dir": " "}, "--checkpoint-dir ' ' is no name of a directory"),
    ],
)
def test_options_that_make_no_sense(values, message):
    with pytest.raises(UsageError, match=message):
        CheckpointOptions(**values)


def program(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """Status, output and errors of step 0's program, run in this process."""
    monkeypatch.setattr(sys, "argv", ["step0_monolith", *map(str, arguments)])
    status = 0
    try:
        run_program(main)
    except SystemExit as left:
        status = left.code
    return status, *capsys.readouterr()


SIZES = ("--num-layers", 9, "--width", 16, "--batch-size", 13, "--num-microbatches", 4)


def test_the_program_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    first = program(monkeypatch, capsys, *SIZES, "--num-iterations", 6, "--checkpoint-dir", tmp_path / "c")
    assert (first[0], first[2]) == (0, "")
    again = program(monkeypatch, capsys, *SIZES, "--num-iterations", 8, "--checkpoint-dir", tmp_path / "c")
    assert (again[0], again[1], again[2].count("\n")) == (2, "", 1)
    assert again[2].startswith("error: --checkpoint-dir ")
    path, result = tmp_path / "c", tmp_path / "r.json"
    status, said, _ = program(monkeypatch, capsys, *SIZES, "--num-iterations", 8, "--checkpoint-dir", path,
                              "--resume", "--result", result)  # fmt: skip
    assert status == 0
    lines = said.splitlines()
    assert lines[:2] == [
        f"resuming after iteration 6 from '{path}/iteration-00000006'", "--num-iterations is now 8, it was 6"
    ]  # fmt: skip
    assert [int(re.match(r"iteration +(\d+)", line)[1]) for line in lines[2:4]] == [7, 8]
    assert [p.name for p in sorted(path.iterdir())] == ["iteration-00000006", "iteration-00000008", "latest", "lock"]
    expected = train(small(num_iterations=8))
    found = read_result(result)
    assert found.losses == expected.losses
    assert len(found.iteration_seconds) == 8
    assert found.weights_sha256 == weights_sha256(expected.parameters)
    assert f"weights sha256 {found.weights_sha256}" in said


def test_a_run_that_was_finished_already_only_says_its_result(tmp_path, monkeypatch, capsys):
    arguments = (*SIZES, "--num-iterations", 4, "--checkpoint-dir", tmp_path, "--resume")
    first, second = (program(monkeypatch, capsys, *arguments)[:2] for _ in range(2))
    assert (first[0], second[0]) == (0, 0)
    assert second[1].splitlines()[-2:] == first[1].splitlines()[-2:]
    assert "iteration     4  loss" not in second[1]
    assert "nothing is left to train; to go on, raise --num-iterations" in second[1]


@pytest.mark.slow
def test_the_program_in_a_process_of_its_own_has_the_same_bits(tmp_path):
    train(small(num_iterations=5, optimizer="adam"), checkpoints=saving(tmp_path / "c"))
    ran = python("step0_monolith", *SIZES, "--optimizer", "adam", "--num-iterations", 10, "--resume",
                 "--checkpoint-dir", tmp_path / "c", "--result", tmp_path / "r.json")  # fmt: skip
    assert ran.status == 0, ran.text
    expected = train(small(num_iterations=10, optimizer="adam"))
    fields = json.loads((tmp_path / "r.json").read_text())
    assert fields["losses"] == expected.losses
    assert fields["weights_sha256"] == weights_sha256(expected.parameters)


def noisy(config, iteration):
    """A batch that draws from the generators of torch and of Python, as a module of a user's own might."""
    inputs, targets = batch(config, iteration)
    return inputs + torch.rand(inputs.shape) + random.random() + random.gauss(0, 1), targets


def test_random_states_are_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "batch", noisy)
    config = small(num_iterations=8)
    torch.manual_seed(1)
    random.seed(1)
    uninterrupted = train(config)
    torch.manual_seed(1)
    random.seed(1)
    train_until(monkeypatch, config, 6, saving(tmp_path, 3))
    torch.manual_seed(2)
    random.seed(2)
    assert_same_training(train(config, checkpoints=saving(tmp_path, resume=True)), uninterrupted)


def test_a_random_state_that_is_none_is_refused():
    tensors, scalars = random_state()
    restore_random_state(Payload(tensors, scalars, ""))
    for bad in ({}, {"random": 3}, {"random": [1, 2]}, {"random": [3, [1], None]}, {"random": [3, ["x"] * 625, None]}):
        with pytest.raises(PayloadError, match="the random state cannot be read"):
            restore_random_state(Payload(tensors, bad, ""))
    for bad in ({}, {"random/0/torch": torch.ones(3)}, {"random/0/torch": torch.ones(3, dtype=torch.uint8)}):
        with pytest.raises(PayloadError, match="the random state cannot be read"):
            restore_random_state(Payload(bad, scalars, ""))
    with pytest.raises(PayloadError, match="the random state cannot be read"):
        restore_random_state(Payload(tensors, scalars, ""), rank=1)


def by_hand(config: Config, left_out: tuple[int, ...] = ()) -> list:
    """The layers after training a config as it is defined, without the updates whose numbers are left out."""
    modules = layers(config)
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = make_optimizer(config, parameters)
    done = 0
    for number in range(config.num_iterations // config.accumulate):
        pieces = [batch(config, number * config.accumulate + k) for k in range(config.accumulate)]
        inputs, targets = (torch.cat(x) for x in zip(*pieces, strict=True))
        optimizer.zero_grad()
        forward_backward(modules, inputs, targets, config.num_microbatches * config.accumulate)
        norm = norm_of(squared_norms(parameters)) if config.max_grad_norm else None
        if number not in left_out:
            update_weights(optimizer, learning_rate(config, done), norm, config.max_grad_norm)
            done += 1
    return modules


# Batches that the microbatches divide evenly: then the pieces of one large batch are the same rows.
LARGE = [
    {"batch_size": 12},
    {"batch_size": 12, "optimizer": "adam", "max_grad_norm": 0.5},
    {"batch_size": 12, "dtype": "bfloat16", "optimizer": "adam"},
    {"batch_size": 12, "dtype": "float64", "max_grad_norm": 2.0},
    {"batch_size": 12, "data": "random"},
    {"batch_size": 200},  # 2 updates an epoch, and rows left over
    {"batch_size": 200, "optimizer": "adam", "lr_schedule": "warmup-cosine", "warmup_iterations": 3},
    {"batch_size": 8, "num_microbatches": 8},
]


@pytest.mark.parametrize("change", LARGE, ids=str)
@pytest.mark.parametrize("accumulate", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_several_batches_are_one_that_is_so_many_times_as_large(change, accumulate):
    pieces = small(**{**change, "accumulate": accumulate, "num_iterations": 5 * accumulate,
                      "warmup_iterations": accumulate * (change.get("warmup_iterations", 0) // 3)})  # fmt: skip
    large = small(**{**change, "batch_size": pieces.batch_size * accumulate, "num_iterations": 5,
                     "num_microbatches": pieces.num_microbatches * accumulate,
                     "warmup_iterations": pieces.warmup_iterations // accumulate})  # fmt: skip
    for update in range(5):
        rows = [batch(pieces, update * accumulate + k) for k in range(accumulate)]
        assert torch.equal(torch.cat([inputs for inputs, _ in rows]), batch(large, update)[0])
        assert torch.equal(torch.cat([targets for _, targets in rows]), batch(large, update)[1])
    found, expected = train(pieces), train(large)
    assert weights_sha256(found.parameters) == weights_sha256(expected.parameters)
    assert_same_bits(everything(found), everything(expected))
    assert (found.updates, len(found.losses)) == (5, 5 * accumulate)
    means = [sum(found.losses[i : i + accumulate]) / accumulate for i in range(0, 5 * accumulate, accumulate)]
    assert means == pytest.approx(expected.losses, rel=1e-6 if pieces.dtype != "float64" else 1e-14)
    assert weights_sha256(found.parameters) != weights_sha256(p for m in layers(pieces) for p in m.parameters())


def test_each_batch_has_a_loss_of_its_own():
    """Not a share of the large batch's: the first is what the same rows give alone."""
    found = train(small(batch_size=12, accumulate=3, num_iterations=3, dtype="float64"))
    alone = [
        forward_backward(layers(found.config), *batch(found.config, i), found.config.num_microbatches).item()
        for i in range(3)
    ]
    assert found.losses == pytest.approx(alone, rel=1e-14)
    assert len(set(alone)) == 3


def test_batches_that_do_not_divide_evenly_are_equal_to_1e_12():
    config = small(accumulate=3, num_iterations=15, dtype="float64", max_grad_norm=1.0)
    large = dataclasses.replace(config, accumulate=1, num_iterations=5, batch_size=39, num_microbatches=3)
    found, expected = named(train(config).layers), named(train(large).layers)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max(), name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"accumulate": 3, "num_iterations": 10}, "--num-iterations 10 is not a multiple of --accumulate 3"),
        ({"accumulate": 5, "num_iterations": 10, "warmup_iterations": 3, "lr_schedule": "warmup-cosine"},
         "--warmup-iterations 3 is not a multiple of --accumulate 5"),
        ({"accumulate": 120, "num_iterations": 120}, "--accumulate 120 times --batch-size 13 is more than the 1437"),
        ({"on_nonfinite": "ignore"}, "choose one of: stop, skip"),
    ],
)  # fmt: skip
def test_configs_that_make_no_sense(values, message):
    with pytest.raises(UsageError, match=message):
        small(**values)


def poisoned(value: float, at: tuple[int, ...]):
    """Batches of which some have one input that is not finite."""

    def make(config, iteration):
        inputs, targets = batch(config, iteration)
        if iteration in at:
            inputs = inputs.clone()
            inputs[-1, 5] = value
        return inputs, targets

    return make


def bad_loss(value: float, at: tuple[int, ...]):
    """A forward and backward pass whose loss is not finite, while all gradients are."""
    calls = iter(range(10_000))

    def make(*args, **kwargs):
        loss = forward_backward(*args, **kwargs)
        return torch.full_like(loss, value) if next(calls) in at else loss

    return make


def bad_gradient(value: float, at: tuple[int, ...]):
    """Gradients of which one element is not finite, or very large, while the loss is."""
    calls = iter(range(10_000))

    def make(modules, *args, **kwargs):
        loss = forward_backward(modules, *args, **kwargs)
        if next(calls) in at:
            modules[4].bias.grad[3] = value
        return loss

    return make


FAULTS = {
    "NaN in an input": ("batch", poisoned, math.nan, "the loss is nan and gradients are not finite"),
    "an infinite input": ("batch", poisoned, math.inf, "the loss is nan and gradients are not finite"),
    "a loss that is NaN": ("forward_backward", bad_loss, math.nan, "the loss is nan"),
    "an infinite loss": ("forward_backward", bad_loss, -math.inf, "the loss is -inf"),
    "a gradient that is NaN": ("forward_backward", bad_gradient, math.nan, "gradients are not finite"),
    "an infinite gradient": ("forward_backward", bad_gradient, math.inf, "gradients are not finite"),
}
OPTIONS = [{}, {"optimizer": "adam", "max_grad_norm": 1.0, "lr_schedule": "warmup-cosine", "warmup_iterations": 2}]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
def test_stop_leaves_everything_as_it_was(monkeypatch, tmp_path, fault, options):
    name, make, value, message = FAULTS[fault]
    monkeypatch.setattr(module, name, make(value, (2,)))
    training = Training(small(num_iterations=8, **options))
    training.step()
    training.step()
    before = everything(training)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in training.optimizer.param_groups]
    with pytest.raises(RunError) as caught:
        training.step()
    assert str(caught.value).startswith(f"iteration 3: {message}; nothing was updated. Lower --learning-rate, or ")
    assert "\n" not in str(caught.value)
    assert_same_bits(everything(training), before)
    assert [{k: v for k, v in g.items() if k != "params"} for g in training.optimizer.param_groups] == groups
    assert (len(training.losses), training.updates) == (2, 2)
    # In a whole run the last checkpoint is what was done before.
    monkeypatch.setattr(module, name, make(value, (2,)))
    with pytest.raises(RunError, match=r"^iteration 3: "):
        train(training.config, checkpoints=saving(tmp_path, 1))
    restored = Training(training.config)
    restored.load(CheckpointDirectory(tmp_path).newest())
    assert_same_bits(everything(restored), before)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
def test_skip_leaves_that_update_out(monkeypatch, fault, options):
    name, make, value, _ = FAULTS[fault]
    monkeypatch.setattr(module, name, make(value, (0, 3)))
    config = small(num_iterations=8, on_nonfinite="skip", **options)
    found = train(config)
    assert (found.updates, len(found.losses)) == (6, 8)
    monkeypatch.undo()
    expected = by_hand(config, left_out=(0, 3))
    assert_same_bits(named(found.layers), named(expected))
    if not options:  # without a schedule, all of it again from clean rows
        assert not torch.equal(named(found.layers)["0.weight"], named(train(config).layers)["0.weight"])
    bad = [i for i, loss in enumerate(found.losses) if not math.isfinite(loss)]
    assert bad == ([] if "gradient" in fault else [0, 3])
    (group,) = found.optimizer.param_groups
    assert group["lr"] == learning_rate(config, 5)
    if options:
        assert learning_rate(config, 5) != learning_rate(config, 7)
        assert {int(s["step"]) for s in found.optimizer.state.values()} == {6}


@pytest.mark.parametrize("fault", ["NaN in an input", "a loss that is NaN"])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_skip_leaves_out_all_batches_of_the_update(monkeypatch, at, fault):
    name, make, value, _ = FAULTS[fault]
    config = small(num_iterations=12, accumulate=3, on_nonfinite="skip", batch_size=12, optimizer="adam")
    monkeypatch.setattr(module, name, make(value, (at,)))
    found = train(config)
    monkeypatch.undo()
    assert (found.updates, len(found.losses)) == (3, 12)
    assert [i for i, loss in enumerate(found.losses) if math.isnan(loss)] == [at]
    said = f"left out 1 of 4 updates, first because of iteration {at + 1}: the loss is nan"
    assert found.left_out().startswith(said)
    assert train(config).left_out() is None
    assert_same_bits(named(found.layers), named(by_hand(config, left_out=(1,))))


def test_stop_names_the_batch_of_an_update_and_not_its_last(monkeypatch):
    monkeypatch.setattr(module, "batch", poisoned(math.nan, (4,)))
    with pytest.raises(RunError, match=r"^iteration 5: the loss is nan and gradients"):
        train(small(num_iterations=12, accumulate=3))


def test_an_update_that_was_left_out_stays_so_after_a_resume(monkeypatch, tmp_path):
    config = small(num_iterations=10, on_nonfinite="skip", optimizer="adam", lr_schedule="warmup-cosine")
    monkeypatch.setattr(module, "batch", poisoned(math.nan, (2, 7)))
    uninterrupted = train(config)
    train_until(monkeypatch, config, 6, saving(tmp_path, 5))
    resumed = train(config, checkpoints=saving(tmp_path, resume=True))
    assert (resumed.updates, [i for i, x in enumerate(resumed.losses) if math.isnan(x)]) == (8, [2, 7])
    assert_same_training(resumed, uninterrupted)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_norm_that_overflows_counts_where_it_is_used(monkeypatch, max_grad_norm):
    config = small(num_iterations=4, dtype="float64", max_grad_norm=max_grad_norm)
    monkeypatch.setattr(module, "forward_backward", bad_gradient(1e200, (2,)))
    training = Training(config)
    training.step()
    training.step()
    before = everything(training)
    if max_grad_norm is None:
        training.step()
        assert training.layers[4].bias[3].item() == pytest.approx(-1e199)
        return
    with pytest.raises(RunError, match=r"^iteration 3: the norm of all gradients is inf; nothing"):
        training.step()
    assert_same_bits(everything(training), before)
    # The norm of squares too large for float32 is known in float64.
    monkeypatch.setattr(module, "forward_backward", bad_gradient(1e30, (2,)))
    clipped = Training(dataclasses.replace(config, dtype="float32"))
    for _ in range(4):
        clipped.step()
    assert all(x.isfinite().all() for x in named(clipped.layers).values())


def test_what_counts_as_finite():
    def gradients(*values, dtype=torch.float32):
        parameters = []
        for value in values:
            parameters.append(torch.nn.Parameter(torch.zeros(1 if value is None else len(value), dtype=dtype)))
            parameters[-1].grad = None if value is None else torch.tensor(value, dtype=dtype)
        return parameters

    assert are_finite([])
    assert are_finite(gradients(None, [], [1.0]))
    assert are_finite(gradients([3e38, 3e38, -3e38], [3e38] * 5))  # sums overflow, and no element has
    assert are_finite(gradients([1e308] * 9, [1.0], dtype=torch.float64))
    assert are_finite(gradients([3e38] * 9, dtype=torch.bfloat16))
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert not are_finite(gradients([0.0, bad], dtype=dtype))
            assert not are_finite(gradients(None, [], [1.0], [3e38, 3e38], [bad], [2.0], dtype=dtype))
    assert not are_finite(gradients([math.inf, -math.inf]))
    assert not_finite(2, 1.5, None) is None
    assert not_finite(2, 1.5, None, 3.0) is None
    assert (
        not_finite(2, math.inf, " of stage 1", 3.0)
        == "iteration 3: the loss is inf and gradients of stage 1 are not finite"
    )
