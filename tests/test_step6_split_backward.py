"""Step 6: a stage's backward in two parts has the bits of the whole one, does nothing twice and keeps no more."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from step0_monolith.data import batch, microbatches
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.model import Draw, Layer, layers
from step0_monolith.reference import forward_backward
from step1_partition.partition import bounds, split
from step1_partition.stage import Stage
from step6_schedules import split_backward
from step6_schedules.split_backward import SplitStage
from tests.modules import batch_normed, embedded, frozen_first, no_parameters_at_first, residual
from tests.monolith import assert_same_bits, monolith, named, small

WIDTH = 8

# What each order does with the microbatches, after all have gone forward; weight gradients always in ascending order.
ORDERS = {
    "W at once": lambda m: [(op, i) for i in range(m) for op in "IW"],
    "W last": lambda m: [("I", i) for i in range(m)] + [("W", i) for i in range(m)],
    "W one late": lambda m: [("I", 0), *(x for i in range(1, m) for x in (("I", i), ("W", i - 1))), ("W", m - 1)],
    "mixed with B": lambda m: [(op, i) for i in range(m) for op in ("B" if i % 2 else "IW")],
    "B": lambda m: [("B", i) for i in range(m)],
}


def run_stages(kind, modules, sizes, inputs, targets, num_microbatches=3, order="B"):
    """All microbatches forward, then in the order; returns what left stage by stage as input gradients."""
    stages = [kind(part, start) for part, (start, _) in zip(split(modules, sizes), bounds(sizes), strict=True)]
    weight = batch_weight(targets)
    pieces = zip(microbatches(inputs, num_microbatches), microbatches(targets, num_microbatches), strict=True)
    for m, (piece, piece_targets) in enumerate(pieces):
        values = (piece,)
        for stage in stages:
            loss = (lambda x, t=piece_targets: loss_share(x, t, weight)) if stage is stages[-1] else None
            values = stage.forward(m, values, loss=loss, draw=Draw(0, 0, m))
    left = {}
    for op, m in ORDERS[order](num_microbatches):
        gradients = None
        for index, stage in reversed(list(enumerate(stages))):
            if op == "W":
                stage.backward_weights(m)
                continue
            gradients = (stage.backward if op == "B" else stage.backward_input)(m, gradients)
            left.update({f"stage {index}, microbatch {m}, input {i}": g.clone() for i, g in enumerate(gradients)})
    assert [stage.in_flight for stage in stages] == [0] * len(stages)
    return left


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_layers_equal_the_monolith(order, dtype):
    config = small(dtype=dtype, data="random")
    inputs, targets = batch(config, 0)
    for sizes in ([9], [4, 5], [1] * 9):
        modules = layers(config)
        run_stages(SplitStage, modules, sizes, inputs, targets, config.num_microbatches, order)
        assert assert_same_bits(named(modules, gradients=True), monolith(config).gradients) == 18


@pytest.mark.parametrize("strided", [False, True], ids=["", "weight not contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_layers_of_every_shape_have_the_bits_of_the_whole_backward(dtype, strided):
    torch.manual_seed(1)
    for rows, n_in, n_out in [(1, 1, 1), (1, 5, 3), (4, 1, 7), (4, 7, 1), (3, 64, 10), (33, 17, 65), (128, 128, 128)]:
        modules = [Layer(n_in, n_out, True, dtype), Layer(n_out, n_in, False, dtype)]
        if strided:
            modules[0].weight = nn.Parameter(modules[0].weight.detach().t().contiguous().t())
        x = torch.randn(rows, n_in, dtype=dtype, requires_grad=True)
        results = []
        for kind in (Stage, SplitStage):
            stage = kind(modules)
            for p in stage.parameters():
                p.grad = None
            for m in range(3):
                stage.forward(m, (x + m,))
            gradients = [torch.full((rows, n_in), 0.3 + m, dtype=dtype) for m in range(3)]
            if kind is Stage:
                left = [stage.backward(m, (gradients[m],))[0] for m in range(3)]
            else:
                left = [stage.backward_input(m, (gradients[m],))[0] for m in range(3)]
                for m in range(3):
                    stage.backward_weights(m)
            results.append({**named(modules, gradients=True), **{f"input {m}": g for m, g in enumerate(left)}})
        assert_same_bits(results[1], results[0])


class Nested(nn.Module):
    """Linear layers below other modules, one without a bias, a residual, a norm, and two outputs."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 12, bias=False), nn.GELU(), nn.Sequential(nn.Linear(12, WIDTH)))
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x + self.block(x))
        return torch.sigmoid(self.gate(x)), x


class Times(nn.Module):
    def forward(self, x, y):
        return x * y


class Shift(nn.Module):
    """The gradient of the output, of the input and of the parameter are one tensor."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x):
        return x + self.shift.expand_as(x)


class Twice(nn.Module):
    """One linear layer called twice, and its weight once more by another way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(torch.relu(self.inner(x))) + 0.1 * (x @ self.inner.weight)


class Odd(nn.Module):
    """Products that look like a linear layer's, and are not quite."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.rows = nn.Parameter(torch.randn(1, WIDTH))
        self.plain = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        x = torch.addmm(self.bias, x, self.weight.t(), alpha=0.5, beta=2)
        x = torch.addmm(self.rows, nn.functional.linear(x, self.strided), self.plain)
        return torch.relu(x) @ x.t() @ x


class Rows(nn.Module):
    """Rows as a sequence, (N, 2, D / 2): what follows sees three dimensions."""

    def forward(self, x):
        return x.reshape(len(x), 2, WIDTH // 2)


def nested():
    return [nn.Linear(WIDTH, WIDTH), Nested(), Times(), nn.Linear(WIDTH, 10)]


def tied():
    modules = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Twice(),
               nn.Linear(WIDTH, 10)]  # fmt: skip
    modules[2].weight = modules[3].weight
    modules[3].bias = modules[0].bias
    return modules


def odd():
    return [nn.Linear(WIDTH, WIDTH), Odd(), Shift(), nn.Linear(WIDTH, 10)]


def partly_frozen():
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(4)] + [nn.Linear(WIDTH, 10)]
    for parameter in (modules[0].weight, modules[1].bias, *modules[2].parameters(), modules[3].weight):
        parameter.requires_grad_(False)
    return modules


def sequences():
    return [Rows(), nn.Linear(4, 4), nn.Conv1d(2, 2, 3, padding=1), nn.TransformerEncoderLayer(4, 2, 6, 0.2),
            nn.Linear(4, 4, bias=False), nn.Flatten(), nn.Linear(WIDTH, 10)]  # fmt: skip


CASES = {
    "embedded": (embedded, [[6], [1, 1, 2, 2], [1] * 6]),
    "residual": (residual, [[5], [2, 1, 2], [1] * 5]),
    "frozen first": (frozen_first, [[4], [1] * 4]),
    "batch norm": (batch_normed, [[4], [2, 2]]),
    "no parameters at first": (no_parameters_at_first, [[4], [1, 1, 2]]),
    "nested": (nested, [[4], [1, 1, 1, 1]]),
    "tied": (tied, [[6]]),
    "odd": (odd, [[4], [1, 1, 1, 1]]),
    "partly frozen": (partly_frozen, [[5], [1] * 5]),
    "sequences": (sequences, [[7], [1] * 7]),
}


def built(make):
    torch.manual_seed(3)
    return make()


def data(make):
    torch.manual_seed(0)
    inputs = torch.randint(50, (7,)) if make is embedded else torch.randn(7, WIDTH)
    return inputs, torch.randint(10, (7,))


@pytest.mark.parametrize("order", ["W last", "mixed with B"])
@pytest.mark.parametrize("case", CASES)
def test_any_modules_equal_the_uncut_ones_and_the_plain_stages(case, order):
    make, partitions = CASES[case]
    inputs, targets = data(make)
    whole = built(make)
    forward_backward(whole, inputs, targets, 3)
    for sizes in partitions:
        cut, plain = built(make), built(make)
        left = run_stages(SplitStage, cut, sizes, inputs, targets, order=order)
        expected = run_stages(Stage, plain, sizes, inputs, targets)
        assert_same_bits(named(cut, gradients=True), named(whole, gradients=True))
        if expected:
            assert_same_bits(left, expected)
        else:
            assert not left


@pytest.mark.parametrize("make", [embedded, nested, tied, sequences])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside too", "forward inside only"])
def test_autocast_has_the_bits_of_the_whole_backward(make, inside):
    inputs, targets = data(make)
    weight = batch_weight(targets)

    def gradients(order):
        stage = SplitStage(built(make))
        run = {"B": lambda m: stage.backward(m, None), "I": lambda m: stage.backward_input(m, None)}
        with torch.autocast("cpu", torch.bfloat16):
            for m in range(2):
                stage.forward(m, (inputs,), loss=lambda x: loss_share(x, targets, weight), draw=Draw(0, 0, m))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            for op, m in ORDERS[order](2):
                run.get(op, stage.backward_weights)(m)
        return named(stage.modules, gradients=True)

    assert_same_bits(gradients("W last"), gradients("B"))


def test_linear_layers_wait_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        counts = middle([nn.Linear(WIDTH, WIDTH) for _ in range(3)], order="IW", counter=Ops)
    assert counts["W"].counter == {"mm": 3, "sum": 3}


def middle(modules, *, order, counter):
    """Runs one microbatch of a stage in the middle, and returns the counter's result for each of its ops."""
    stage = SplitStage(modules)
    x = torch.randn(7, WIDTH, requires_grad=True)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counts = {}
    with counter() as count:
        (output,) = stage.forward(0, (x,))
    counts["F"] = count
    gradient = torch.randn_like(output)
    for op in order:
        with counter() as count:
            if op == "W":
                stage.backward_weights(0)
            else:
                (stage.backward if op == "B" else stage.backward_input)(0, (gradient,))
        counts[op] = count
    return counts


def flops():
    return FlopCounterMode(display=False)


@pytest.mark.parametrize(
    "modules",
    [
        [Layer(WIDTH, WIDTH, True, torch.float32), Layer(WIDTH, WIDTH, False, torch.float32)],
        [nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, 5)],
        [nn.Sequential(nn.Linear(WIDTH, 30), nn.Sequential(nn.LayerNorm(30), nn.Linear(30, 20)), nn.Linear(20, 10))],
        [Nested(), Times(), nn.Linear(WIDTH, 10)],
    ],
    ids=["Layer", "Linear", "nested Linear", "residual block"],
)
def test_f_i_and_w_of_linear_layers_cost_the_same(modules):
    split_, whole = (middle(modules, order=order, counter=flops) for order in ("IW", "B"))
    f, i, w = (split_[op].get_total_flops() for op in "FIW")
    assert f == i == w > 0
    assert whole["B"].get_total_flops() == i + w


FREE = {"detach", "t", "transpose", "view", "_unsafe_view", "expand", "clone", "_to_copy", "alias", "add_", "add",
        "empty_like", "zeros_like", "new_empty_strided", "copy_"}  # fmt: skip


class Ops(TorchDispatchMode):
    """Counts the operations that compute, and not those that copy, reshape, or add gradients up."""

    def __enter__(self):
        super().__enter__()
        self.counter = Counter()
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.counter[name] += 1
        return func(*args, **(kwargs or {}))


def with_dropout():
    return [Layer(WIDTH, WIDTH, True, torch.float32), nn.Dropout(0.5), Layer(WIDTH, WIDTH, False, torch.float32)]


@pytest.mark.parametrize("make", [with_dropout, nested, tied, odd, partly_frozen, sequences, batch_normed])
def test_nothing_is_computed_twice(make):
    modules = built(make)
    split_, whole = (middle(modules, order=order, counter=Ops) for order in ("IW", "B"))
    assert sum(whole["B"].counter.values()) > 0
    assert split_["I"].counter + split_["W"].counter == whole["B"].counter
    assert not split_["W"].counter.keys() - {"mm", "sum"}


def test_without_a_gradient_for_the_input_the_first_layer_costs_i_nothing():
    unit = 2 * 7 * WIDTH * WIDTH
    stage = SplitStage([Layer(WIDTH, WIDTH, True, torch.float32) for _ in range(3)])
    stage.forward(0, (torch.randn(7, WIDTH),))
    with flops() as i:
        assert stage.backward_input(0, (torch.randn(7, WIDTH),)) == ()
    with flops() as w:
        stage.backward_weights(0)
    assert (i.get_total_flops(), w.get_total_flops()) == (2 * unit, 3 * unit)


def test_frozen_parameters_cost_w_nothing():
    modules = [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    modules[0].weight.requires_grad_(False)
    counts = middle(modules, order="IW", counter=Ops)
    assert counts["W"].counter == {"sum": 1}
    modules[0].bias.requires_grad_(False)
    assert middle(modules, order="IW", counter=Ops)["W"].counter == {}


def test_i_adds_nothing_and_w_adds_in_place():
    modules = built(embedded)[2:]
    stage = SplitStage(modules)
    for m in range(2):
        (output,) = stage.forward(m, (torch.randn(3, 8),))
    stage.backward_input(0, (torch.ones_like(output),))
    assert all(p.grad is None for p in stage.parameters())
    stage.backward_weights(0)
    before = [(p.grad, p.grad.clone()) for p in stage.parameters()]
    stage.backward_input(1, (torch.ones_like(output),))
    assert all(torch.equal(grad, copy) for grad, copy in before)
    stage.backward_weights(1)
    assert all(p.grad is grad for p, (grad, _) in zip(stage.parameters(), before, strict=True))
    assert not any(torch.equal(grad, copy) for grad, copy in before)


def test_sums_are_formed_in_no_tensor_that_travels():
    stage = SplitStage([Shift()])
    travelling = []
    for m in range(2):
        stage.forward(m, (torch.randn(1, WIDTH, requires_grad=True),))
    for m in range(2):
        gradient = torch.full((1, WIDTH), m + 1.0)
        travelling += [gradient, *stage.backward_input(m, (gradient,))]
    for m in range(2):
        stage.backward_weights(m)
    assert [t.unique().tolist() for t in travelling] == [[1.0], [1.0], [2.0], [2.0]]
    assert stage.parameters()[0].grad.unique().tolist() == [3.0]


class Scores(nn.Module):
    def forward(self, query, key, unused):
        return nn.functional.linear(query, key)


def test_inputs_are_no_parameters_even_where_a_linear_layer_has_its_weight():
    inputs = [torch.randn(rows, WIDTH, requires_grad=True) for rows in (3, 5, 2)]
    left = []
    for op in ("backward", "backward_input"):
        stage = SplitStage([Scores()])
        (output,) = stage.forward(0, tuple(inputs))
        left.append(getattr(stage, op)(0, (torch.arange(15.0).reshape(output.shape),)))
    for found, expected in zip(*left, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(found, torch.zeros(2, WIDTH))
    with Ops() as ops:
        stage.backward_weights(0)
    assert not ops.counter
    assert stage.in_flight == 0


class Live(TorchDispatchMode):
    """Bytes of all tensors made inside that are still alive, whoever holds them; `at` notes them before each `mm`."""

    def __init__(self):
        super().__init__()
        self.made, self.at = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "mm":
            self.at.append(self.bytes())
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self):
        return sum(size for reference, size in self.made.values() if not reference.expired())


ROWS = 32
UNIT = ROWS * WIDTH * 4  # bytes of one activation


def relu_layers():
    return [Layer(WIDTH, WIDTH, True, torch.float32) for _ in range(3)]


def dropout_layers():
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(3)]


@pytest.mark.parametrize("make", [relu_layers, dropout_layers])
@pytest.mark.parametrize("first", [True, False])
def test_tensors_are_let_go_of_as_soon_as_they_are_used(make, first):
    stage = SplitStage(make())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, gradient = torch.randn(ROWS, WIDTH, requires_grad=not first), torch.randn(ROWS, WIDTH)
    with Live() as live:
        output = stage.forward(0, (x,))
        forward = live.bytes()
        stage.backward_input(0, (gradient,))
        # The inputs of layers 1 and 2, and the gradients at three products; of the graph nothing but the output that
        # is still held here.
        assert live.bytes() == 6 * UNIT
        del output
        live.at = []
        stage.backward_weights(0)
    assert forward == (3 if make is relu_layers else 6) * UNIT  # three outputs, and three masks
    assert len(live.at) == 3
    assert live.at == sorted(live.at, reverse=True)
    assert live.at[0] == 5 * UNIT
    assert live.at[2] == 2 * UNIT
    assert live.bytes() == 0


def test_the_graph_of_an_output_that_somebody_holds_keeps_no_gradients():
    stage = SplitStage(relu_layers())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, gradient = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    with Live() as live:
        output = stage.forward(0, (x,))
        stage.backward_input(0, (gradient,))
        stage.backward_weights(0)
        assert live.bytes() == output[0].nbytes == UNIT


@pytest.mark.filterwarnings("error")  # such as torch's, when a result does not have the shape of its place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_formed_in_one_place_have_the_bits_of_the_whole_backward(dtype, monkeypatch):
    monkeypatch.setattr(split_backward, "LARGE", 0)
    torch.manual_seed(1)
    # The same shape twice in a row, and others between.
    widths = [(64, 64), (64, 64), (64, 10), (10, 64), (64, 64)]
    modules = [Layer(n_in, n_out, True, dtype) for n_in, n_out in widths]
    inputs = [torch.randn(4, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    gradients = [torch.randn(4, 64, dtype=dtype) for _ in range(3)]
    results = []
    for kind in (Stage, SplitStage):
        stage = kind(modules)
        for parameter in stage.parameters():
            parameter.grad = None
        for m, x in enumerate(inputs):
            stage.forward(m, (x,))
        for m, gradient in enumerate(gradients):
            if kind is Stage:
                stage.backward(m, (gradient,))
            else:
                stage.backward_input(m, (gradient,))
                stage.backward_weights(m)
        results.append(named(modules, gradients=True))
    assert_same_bits(results[1], results[0])
    assert stage._room.data_ptr() not in [p.grad.data_ptr() for p in stage.parameters()]


def test_products_are_formed_in_one_place(monkeypatch):
    monkeypatch.setattr(split_backward, "LARGE", 0)
    stage = SplitStage(relu_layers())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rooms = set()
    for m in range(3):
        stage.forward(m, (torch.randn(ROWS, WIDTH),))
        stage.backward_input(m, (torch.randn(ROWS, WIDTH),))
        stage.backward_weights(m)
        rooms.add(stage._room)
    assert len(rooms) == 1


@pytest.mark.parametrize("inside", ["FB", "B"])
def test_products_formed_in_one_place_are_cast_as_autocast_does(inside, monkeypatch):
    monkeypatch.setattr(split_backward, "LARGE", 0)
    torch.manual_seed(1)
    modules, x, gradient = [nn.Linear(64, 64) for _ in range(2)], torch.randn(8, 64), torch.randn(8, 64)
    results = []
    for kind in (Stage, SplitStage):
        stage = kind(modules)
        for parameter in stage.parameters():
            parameter.grad = None
        for m in range(4):  # the first two without autocast
            with torch.autocast("cpu", torch.bfloat16, enabled=m > 1 and "F" in inside):
                (output,) = stage.forward(m, (x + m,))
            with torch.autocast("cpu", torch.bfloat16, enabled=m > 1):
                given = (gradient.to(output.dtype),)
                if kind is Stage:
                    stage.backward(m, given)
                else:
                    stage.backward_input(m, given)
                    stage.backward_weights(m)
        results.append(named(modules, gradients=True))
    assert_same_bits(results[1], results[0])


def test_in_flight_counts_until_the_weights():
    stage = SplitStage([nn.Linear(2, 2)])
    for m in range(3):
        stage.forward(m, (torch.ones(1, 2),))
    seen = [stage.in_flight]
    stage.backward_input(0, (torch.ones(1, 2),))
    seen.append(stage.in_flight)
    stage.backward(1, (torch.ones(1, 2),))
    seen.append(stage.in_flight)
    stage.backward_weights(0)
    seen.append(stage.in_flight)
    assert seen == [3, 3, 2, 1]


def test_an_op_out_of_its_order_says_so():
    stage, gradient = SplitStage([nn.Linear(2, 2)]), (torch.ones(1, 2),)
    input_first = r"backward for the input of microbatch 3, but its forward has not run or is used up"
    weights_first = (
        r"backward for the weights of microbatch 3, but its backward for the input has not run or is used up"
    )
    with pytest.raises(RuntimeError, match=input_first):
        stage.backward_input(3, gradient)
    stage.forward(3, (torch.ones(1, 2),))
    with pytest.raises(RuntimeError, match=weights_first):
        stage.backward_weights(3)
    stage.backward_input(3, gradient)
    with pytest.raises(RuntimeError, match=input_first):
        stage.backward_input(3, gradient)
    with pytest.raises(RuntimeError, match=r"backward of microbatch 3, but its forward has not run or is used up"):
        stage.backward(3, gradient)
    stage.backward_weights(3)
    with pytest.raises(RuntimeError, match=weights_first):
        stage.backward_weights(3)
    stage.forward(3, (torch.ones(1, 2),))
    stage.backward(3, gradient)
    with pytest.raises(RuntimeError, match=weights_first):
        stage.backward_weights(3)


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = 2 * x
        y = self.inner(x)
        x.add_(1)
        return y


@pytest.mark.parametrize("kind", ["backward", "backward_input"])
def test_a_layer_whose_input_is_overwritten_is_refused(kind):
    stage = SplitStage([Overwrites()])
    stage.forward(0, (torch.randn(2, WIDTH, requires_grad=True),))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        getattr(stage, kind)(0, (torch.ones(2, WIDTH),))


class Hooked(nn.Module):
    """A linear layer whose output's gradient is clamped on its way, as clipping inside a model does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_hooks_on_a_linear_layers_output_count(needs_gradient):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(8, 8), Hooked(), nn.Tanh(), Hooked())]
    x, g = torch.randn(5, 8).requires_grad_(needs_gradient), torch.randn(5, 8)
    found = []
    for cls in (Stage, SplitStage):
        stage = cls(modules)
        for parameter in stage.parameters():
            parameter.grad = None
        stage.forward(0, (x,))
        if cls is Stage:
            gradients = stage.backward(0, (g,))
        else:
            gradients = stage.backward_input(0, (g,))
            stage.backward_weights(0)
        found.append([*gradients, *(parameter.grad for parameter in stage.parameters())])
    assert len(found[0]) == 6 + needs_gradient
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Buffered(nn.Module):
    """Copies its input into one buffer, which the next microbatch overwrites."""

    def __init__(self):
        super().__init__()
        self.linear, self.buffer = nn.Linear(8, 8), torch.zeros(5, 8)

    def forward(self, x):
        with torch.no_grad():
            self.buffer.copy_(x)
        return self.linear(self.buffer)


def test_an_input_overwritten_between_i_and_w_is_noticed():
    stage = SplitStage([Buffered()])
    stage.forward(0, (torch.randn(5, 8),))
    stage.backward_input(0, (torch.randn(5, 8),))
    stage.forward(1, (torch.randn(5, 8),))
    with pytest.raises(RuntimeError, match="microbatch 0: the input of a linear layer was overwritten"):
        stage.backward_weights(0)


def test_an_input_overwritten_before_the_linear_layer_takes_it_is_none_of_its_business():
    modules = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)]
    assert middle(modules, order="IW", counter=Ops)["W"].counter == {"mm": 2, "sum": 2}


class OverwritesOnTheWayBack(nn.Module):
    """Its backward overwrites what the linear layer has used by then, as reversible networks do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = 2 * x
        seen = x.detach()
        x.register_hook(lambda gradient: (seen.zero_(), gradient)[1])
        return self.linear(x)


def test_an_input_overwritten_during_i_is_noticed():
    stage = SplitStage([OverwritesOnTheWayBack()])
    stage.forward(0, (torch.randn(5, 8, requires_grad=True),))
    stage.backward_input(0, (torch.randn(5, 8),))
    with pytest.raises(RuntimeError, match="microbatch 0: the input of a linear layer was overwritten"):
        stage.backward_weights(0)


def test_a_transposed_weight_that_two_products_share():
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            transposed = self.weight.t()
            return torch.relu(x @ transposed) @ transposed

    module, x, g = Shared(), torch.randn(5, 8), torch.randn(5, 8)
    module(x).backward(g)
    expected, module.weight.grad = module.weight.grad, None
    stage = SplitStage([module])
    stage.forward(0, (x,))
    stage.backward_input(0, (g,))
    stage.backward_weights(0)
    assert torch.equal(module.weight.grad, expected)


def test_a_bias_that_is_spread_over_the_outputs():
    torch.manual_seed(0)

    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(1))

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    module, x, g = Spread(), torch.randn(5, 8), torch.randn(5, 8)
    module(x).backward(g)
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    stage = SplitStage([module])
    stage.forward(0, (x,))
    stage.backward_input(0, (g,))
    stage.backward_weights(0)
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, module.parameters(), strict=True))
