"""Step 0: the config, the data, the model and the reference."""

import hashlib
import json
import os
import shlex
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from step0_monolith.config import Config
from step0_monolith.data import _rows_of_digits, batch, digits, microbatch_sizes
from step0_monolith.data import test_set as the_test_set
from step0_monolith.files import check_writable, write_whole
from step0_monolith.loss import batch_weight, loss_share, total
from step0_monolith.model import Draw, layer, layers, run_layers
from step0_monolith.options import RunError, UsageError
from step0_monolith.reference import evaluate, forward_backward, metrics
from step0_monolith.result import read_result, weights_sha256
from step0_monolith.train import result_of, train
from tests.monolith import assert_same_bits, monolith, named, small
from tests.ranks import python, run_command

BAD_VALUES = [
    ({"num_layers": 0}, "--num-layers must be at least 1, not 0"),
    ({"width": -3}, "--width must be at least 1, not -3"),
    ({"batch_size": "3.5"}, "--batch-size must be a whole number, not '3.5'"),
    ({"batch_size": 3.5}, "--batch-size must be a whole number, not 3.5"),
    ({"num_microbatches": "x"}, "--num-microbatches must be a whole number, not 'x'"),
    ({"num_microbatches": True}, "--num-microbatches must be a whole number"),
    ({"num_iterations": 0}, "--num-iterations must be at least 1"),
    ({"seed": -1}, "--seed must be at least 0"),
    ({"threads": 0}, "--threads must be at least 1"),
    ({"learning_rate": "nan"}, "--learning-rate must be a finite number above 0"),
    ({"learning_rate": 0}, "--learning-rate must be a finite number above 0"),
    ({"learning_rate": "fast"}, "--learning-rate must be a number, not 'fast'"),
    ({"optimizer": "lion"}, "choose one of: sgd, adam"),
    ({"data": "mnist"}, "choose one of: digits, random"),
    ({"dtype": "float16"}, "choose one of: float32, float64, bfloat16"),
    ({"batch_size": 4, "num_microbatches": 5}, "--num-microbatches 5 is more than the 4 rows"),
    ({"batch_size": 1438}, "more than the 1437 training rows"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_config_refuses(values, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")) as caught:
        Config(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--width", "0"], "--width must be at least 1, not 0", marks=pytest.mark.slow),
        pytest.param(["--wdith", "3"], "unrecognized arguments", marks=pytest.mark.slow),
        (["--result", "nowhere/at/all.json"], "cannot be written"),
        pytest.param(["--result", "r.txt"], "must end in .json", marks=pytest.mark.slow),
    ],
)
def test_program_refuses_in_one_line_with_status_2(arguments, message):
    ran = python("step0_monolith", *arguments)
    assert ran.status == 2
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert ran.stdout == ""


def test_digits_are_those_of_scikit_learn_with_and_without_its_file(monkeypatch):
    bunch = load_digits()
    expected = np.column_stack([bunch.data, bunch.target])
    assert np.array_equal(_rows_of_digits(), expected)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert np.array_equal(_rows_of_digits(), expected)


def test_digits_are_split_and_standardised():
    train_images, train_labels, test_images, test_labels = digits()
    assert train_images.shape == (1437, 64)
    assert test_images.shape == (360, 64)
    assert len(train_labels) + len(test_labels) == 1797
    assert torch.allclose(train_images.mean(0), torch.zeros(64, dtype=torch.float64), atol=1e-12)
    deviation = train_images.std(0)
    assert torch.allclose(deviation[deviation > 0], torch.ones(1, dtype=torch.float64))
    rows = {tuple(row) for row in train_images.tolist()}
    assert len(rows & {tuple(row) for row in test_images.tolist()}) == 0
    assert set(test_labels.tolist()) == set(range(10))


def test_each_epoch_shows_every_row_at_most_once_in_its_own_order():
    config = Config(batch_size=60)
    per_epoch = 1437 // 60
    inputs = digits()[0].float()
    index = {tuple(row): i for i, row in enumerate(inputs.tolist())}
    epochs = []
    for epoch in range(2):
        rows = [index[tuple(row)] for i in range(per_epoch) for row in batch(config, epoch * per_epoch + i)[0].tolist()]
        assert len(rows) == len(set(rows)) == per_epoch * 60
        epochs.append(rows)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("data", ["digits", "random"])
def test_a_batch_depends_on_seed_and_iteration_alone(data):
    config = Config(data=data)
    later = batch(config, 7)
    batch(config, 3)
    assert all(torch.equal(a, b) for a, b in zip(later, batch(config, 7), strict=True))
    assert not torch.equal(later[0], batch(config, 8)[0])
    assert not torch.equal(later[0], batch(Config(data=data, seed=1), 7)[0])


def test_microbatches_are_as_many_as_asked_for():
    assert microbatch_sizes(8, 5) == [2, 2, 2, 1, 1]
    for rows in range(1, 12):
        for pieces in range(1, rows + 1):
            sizes = microbatch_sizes(rows, pieces)
            assert len(sizes) == pieces
            assert sum(sizes) == rows
            assert max(sizes) - min(sizes) <= 1


def test_any_slice_can_be_built_alone():
    config = small()
    whole = named(layers(config))
    torch.manual_seed(123)  # the global generator has no say
    apart = {**named(layers(config, 4, 9), 4), **named([layer(config, 2)], 2), **named(layers(config, 0, 2))}
    apart.update(named(layers(config, 3, 4), 3))
    assert assert_same_bits(apart, whole) == 18
    weights = [tuple(w.flatten()[:4].tolist()) for name, w in whole.items() if name.endswith("weight")]
    assert len(set(weights)) == len(weights)
    assert not torch.equal(whole["3.weight"], named(layers(small(seed=1)))["3.weight"])


def test_building_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    layers(small())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_layers", [8, 16])
def test_the_first_loss_depends_on_the_input(num_layers):
    config = Config(num_layers=num_layers)
    inputs, _ = batch(config, 0)
    with torch.no_grad():
        (logits,) = run_layers(layers(config), (inputs,))
    assert logits.std(0).min() >= 0.1
    targets = batch(config, 0)[1]
    losses = {
        round(forward_backward(layers(config), x, targets, 8).item(), 6)
        for x in (inputs, torch.zeros_like(inputs), inputs.flip(0), -inputs)
    }
    assert len(losses) == 4


def test_default_run_learns():
    trained = train(Config())
    inputs, targets = the_test_set(Config())
    assert evaluate(trained.layers, inputs, targets, 8)["accuracy"] >= 0.96


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 13])
def test_microbatches_do_not_change_loss_and_gradients(num_microbatches):
    config = small(dtype="float64")
    inputs, targets = batch(config, 0)
    whole, cut = layers(config), layers(config)
    (output,) = run_layers(whole, (inputs,))
    loss = nn.functional.cross_entropy(output, targets)
    loss.backward()
    found = forward_backward(cut, inputs, targets, num_microbatches)
    assert abs(found.item() - loss.item()) < 1e-12
    expected = named(whole, gradients=True)
    for name, gradient in named(cut, gradients=True).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-15), name


def test_ignored_rows_weigh_nothing():
    config = small(dtype="float64")
    inputs, targets = batch(config, 0)
    targets = targets.clone()
    targets[[0, 1, 2, 3, 7]] = -100  # the first microbatch of 4 is ignored whole
    whole = layers(config)
    (output,) = run_layers(whole, (inputs,))
    expected = nn.functional.cross_entropy(output, targets, ignore_index=-100)
    assert abs(forward_backward(layers(config), inputs, targets, 4).item() - expected.item()) < 1e-12
    nothing = forward_backward(layers(config), inputs, torch.full_like(targets, -100), 4)
    assert nothing.item() == 0.0


def test_logged_loss_agrees_with_the_gradient_by_finite_difference():
    config = small(dtype="float64")
    inputs, targets = batch(config, 0)
    modules = layers(config)
    forward_backward(modules, inputs, targets, 3)
    weight = modules[4].weight
    step, place = 1e-6, (3, 5)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[place] += sign * step
        values.append(forward_backward([*modules], inputs, targets, 3).item())
        with torch.no_grad():
            weight[place] -= sign * step
    fresh = layers(config)
    forward_backward(fresh, inputs, targets, 3)
    assert abs((values[0] - values[1]) / (2 * step) - fresh[4].weight.grad[place].item()) < 1e-6


def test_two_batches_without_zero_grad_add_up():
    config = small(dtype="float64")
    first, second, both = layers(config), layers(config), layers(config)
    forward_backward(first, *batch(config, 0), 4)
    forward_backward(second, *batch(config, 1), 4)
    forward_backward(both, *batch(config, 0), 4)
    forward_backward(both, *batch(config, 1), 4)
    a, b = named(first, gradients=True), named(second, gradients=True)
    for name, gradient in named(both, gradients=True).items():
        assert torch.allclose(gradient, a[name] + b[name], rtol=1e-12, atol=1e-15)


def test_permuted_targets_change_the_loss():
    config = small()
    inputs, targets = batch(config, 0)
    assert forward_backward(layers(config), inputs, targets, 4) != forward_backward(
        layers(config), inputs, targets.roll(1), 4
    )


def test_dropout_depends_on_seed_iteration_microbatch_and_layer_alone():
    module = nn.Dropout(0.5)
    x = torch.ones(4, 64)

    def mask(draw, index=0):
        return run_layers([module], (x,), index, draw)[0]

    draw = Draw(0, 0, 0)
    before = torch.get_rng_state()
    first = mask(draw)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(first, mask(draw))
    others = [Draw(1, 0, 0), Draw(0, 1, 0), Draw(0, 0, 1)]
    assert all(not torch.equal(first, mask(other)) for other in others)
    assert not torch.equal(first, mask(draw, index=1))


def test_evaluation_leaves_everything_as_it_was():
    config = small()
    modules = [layer(config, 0), nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.Dropout(0.5), *layers(config, 1)]
    modules[1].eval()
    before = {(i, name): value.clone() for i, m in enumerate(modules) for name, value in m.state_dict().items()}
    evaluate(modules, *the_test_set(config), 8)
    assert [m.training for m in modules[:4]] == [True, False, True, True]
    assert len(before) > 10
    after = {(i, name): value for i, m in enumerate(modules) for name, value in m.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_hash_is_of_little_endian_bytes_in_layer_order():
    modules = layers(small())
    expected = hashlib.sha256()
    for module in modules:
        for tensor in (module.weight, module.bias):
            values = tensor.detach().flatten().tolist()
            expected.update(struct.pack(f"<{len(values)}f", *values))
    assert weights_sha256(p for m in modules for p in m.parameters()) == expected.hexdigest()
    assert weights_sha256([torch.ones(2, 2, dtype=torch.bfloat16).t()]) == hashlib.sha256(b"\x80\x3f" * 4).hexdigest()


def test_result_file(tmp_path):
    path = tmp_path / "result.json"
    ran = python("step0_monolith", "--num-iterations", 6, "--batch-size", 10, "--num-microbatches", 3,
                 "--result", path)  # fmt: skip
    assert ran.status == 0, ran.text
    fields = json.loads(path.read_text())
    assert list(fields) == [
        "schedule", "num_ranks", "num_stages", "num_microbatches", "losses", "iteration_seconds", "test_accuracy",
        "weights_sha256", "bubble", "peak_in_flight", "bytes_sent",
    ]  # fmt: skip
    expected = monolith(Config(num_iterations=6, batch_size=10, num_microbatches=3))
    result = read_result(path)
    assert result.losses == expected.losses
    assert result.weights_sha256 == expected.weights_sha256
    assert (result.schedule, result.bubble) == (None, None)
    assert len(result.iteration_seconds) == 6
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_random_data_has_no_accuracy():
    config = small(data="random")
    assert result_of(config, train(config)).test_accuracy is None


def test_the_same_run_twice_has_the_same_bits():
    config = small(dtype="bfloat16", optimizer="adam")
    first, second = train(config), train(config)
    assert first.losses == second.losses
    assert_same_bits(named(first.layers), named(second.layers))


def test_ignored_rows_do_not_count_in_the_accuracy():
    outputs = [torch.eye(10)[:3], torch.eye(10)[:2]]
    found = metrics(outputs, torch.tensor([0, 1, -100, 0, 9]))
    assert found["accuracy"] == 3 / 4


def test_a_loss_that_is_not_a_number_is_null_in_the_file(tmp_path):
    config = small(num_iterations=2)
    result = result_of(config, train(config))
    result.losses = [float("nan"), 1.0]
    result.write(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["losses"] == [None, 1.0]


def test_the_longest_names_can_be_written(tmp_path):
    path = tmp_path / ("b" * 250 + ".json")
    check_writable("--result", path)
    write_whole(path, lambda temporary: temporary.write_text("x"))
    assert path.read_text() == "x"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_whole(link, lambda temporary: temporary.write_text("y"))
    assert (link.is_symlink(), path.read_text()) == (True, "y")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UsageError, match="not an ordinary file"):
        check_writable("--result", tmp_path / "pipe.json")


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "status", "said"), [("| head -1; exit ${PIPESTATUS[0]}", 1, ""),
                                                       (">/dev/full", 1, "error: the output could not be written"),
                                                       ("2>&-", 0, "")])  # fmt: skip
def test_output_that_nobody_takes(shell, status, said):
    command = f"{shlex.quote(sys.executable)} -m step0_monolith --num-iterations 20 {shell}"
    ran = run_command(["bash", "-c", command])
    assert ran.status == status
    assert ran.stderr.startswith(said)
    assert "Traceback" not in ran.stderr


def test_files_are_whole_or_not_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left"):
        write_whole(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="is a directory"):
        check_writable("--result", tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable("--result", tmp_path / "absent" / "a.json")


def test_one_thread_a_process_unless_told_otherwise():
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            train(small(threads=threads, num_iterations=1))
            assert torch.get_num_threads() == threads
        assert Config().threads == 1
    finally:
        torch.set_num_threads(before)


def test_loss_share_of_narrow_types_is_computed_in_float32():
    output = torch.randn(4, 10).to(torch.bfloat16)
    targets = torch.arange(4)
    share = loss_share(output, targets, 4)
    assert share.dtype == torch.float32
    assert total([share]).dtype == torch.float64
    assert batch_weight(targets) == 4
