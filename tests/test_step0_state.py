"""Step 0: what training must not lose, by layer: saved in one cut, taken up in another, and the bits go on."""

import copy
import re
from collections.abc import Iterable

import pytest
import torch
from torch import nn, optim

from step0_monolith.payload import Payload, PayloadError, pack, unpack
from step0_monolith.state import collect, counts_of, hyper_parameters, layer_of, named_tensors, restore
from tests.monolith import assert_same_bits

OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adam": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95)}),
    "adam lr as a tensor": (optim.Adam, {"lr": torch.tensor(0.01)}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01}),
    "rmsprop centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "adagrad": (optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.01, "t0": 2}),
    "adafactor": (optim.Adafactor, {"lr": 0.01}),
    "muon": (optim.Muon, {"lr": 0.01}),
}
CUTS = {1: [range(9)], 2: [range(5), range(5, 9)], 3: [range(3), range(3, 6), range(6, 9)],
        4: [range(1), range(1, 5), range(5, 7), range(7, 9)], 9: [range(i, i + 1) for i in range(9)]}  # fmt: skip


class Part:
    """Some of the layers, and an optimizer of their own, as a rank has them."""

    def __init__(
        self, indices: Iterable[int] = range(9), kind: str = "adam", seed: int = 0, dtype=None, **changes
    ) -> None:
        self.layers = {}
        for index in indices:
            torch.manual_seed(seed * 100 + index)
            # Sizes that no alignment suits; Muon takes matrices only.
            self.layers[index] = nn.Linear(5, 3, bias=kind != "muon", dtype=dtype) if index != 4 else nn.ReLU()
        cls, settings = OPTIMIZERS[kind]
        parameters = [p for layer in self.layers.values() for p in layer.parameters()]
        self.optimizer = cls([{"params": parameters}], **{**settings, **changes})

    def updates(self, start: int, stop: int) -> "Part":
        for number in range(start, stop):
            for name, parameter in named_tensors(self.layers).items():
                generator = torch.Generator().manual_seed(1000 * number + 10 * layer_of(name) + ("bias" in name))
                if isinstance(parameter, nn.Parameter):
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            self.optimizer.step()
        return self

    def payload(self) -> Payload:
        return unpack(pack(*collect(self.layers, self.optimizer)))


def everything(part: Part) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state, with the settings as numbers: what a refusal must not change."""
    found = collect(part.layers, part.optimizer)
    return {name: x for name, x in found.tensors.items() if x.numel()}


def assert_refused(part: Part, payloads: list[Payload], message: str) -> None:
    """Refused for the reason given, in one line, and nothing was changed by it."""
    before, scalars = everything(part), collect(part.layers, part.optimizer).scalars
    states = {id(p): {k: id(v) for k, v in s.items()} for p, s in part.optimizer.state.items()}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in part.optimizer.param_groups]
    with pytest.raises(PayloadError, match=message) as caught:
        restore(part.layers, part.optimizer, payloads)
    assert "\n" not in str(caught.value)
    if before:
        assert_same_bits(everything(part), before)
    assert collect(part.layers, part.optimizer).scalars == scalars
    assert {id(p): {k: id(v) for k, v in s.items()} for p, s in part.optimizer.state.items()} == states
    assert [{k: v for k, v in group.items() if k != "params"} for group in part.optimizer.param_groups] == settings


def changed(payload: Payload, drop: str | None = None, tensors: dict | None = None, scalars=lambda s: None) -> Payload:
    """A payload in which something is not as it should be."""
    copied = copy.deepcopy(payload.scalars)
    scalars(copied)
    kept = {name: x for name, x in payload.tensors.items() if drop is None or not re.fullmatch(drop, name)}
    return Payload({**kept, **(tensors or {})}, copied, payload.sha256)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_in_three_parts_and_taken_up_in_others(kind):
    saved, going_on = [], {}
    for indices in CUTS[3]:
        part = Part(indices, kind).updates(0, 3)
        saved.append(part.payload())
        going_on |= everything(part.updates(3, 5))
    assert not torch.equal(saved[0].tensors["0.weight"], going_on["0.weight"])
    for cut in (1, 2, 4):
        found = {}
        for indices in CUTS[cut]:
            part = Part(indices, kind, seed=1).updates(10, 11)
            restore(part.layers, part.optimizer, saved)
            found |= everything(part.updates(3, 5))
        assert_same_bits(found, going_on)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_cut_into_every_other_in_other_types(kind, dtype):
    for saving in CUTS.values():
        parts = [Part(indices, kind, dtype=dtype).updates(0, 3) for indices in saving]
        saved = [part.payload() for part in parts]
        going_on = {name: x for part in parts for name, x in everything(part.updates(3, 5)).items()}
        for loading in CUTS.values():
            found = {}
            for indices in loading:
                part = Part(indices, kind, seed=1, dtype=dtype)
                restore(part.layers, part.optimizer, saved)
                found |= everything(part.updates(3, 5))
            assert_same_bits(found, going_on)


def test_all_of_torchs_optimizers_are_tried():
    special = {optim.Optimizer, optim.LBFGS, optim.SparseAdam}  # no optimizer; a closure and all at once; sparse only
    known = {x for x in vars(optim).values() if isinstance(x, type) and issubclass(x, optim.Optimizer)}
    assert known - special == {cls for cls, _ in OPTIMIZERS.values()}


def test_a_snapshot_is_not_changed_by_later_updates():
    part = Part(kind="adam").updates(0, 2)
    found = collect(part.layers, part.optimizer)
    before = {name: x.clone() for name, x in found.tensors.items()}
    scalars = copy.deepcopy(found.scalars)
    part.updates(2, 4)
    for group in part.optimizer.param_groups:
        group["lr"] = 5.0
    assert_same_bits(found.tensors, before)
    assert found.scalars == scalars
    restored = Part(seed=1)
    payload = unpack(pack(*found))
    restore(restored.layers, restored.optimizer, [payload])
    kept = {name: x.clone() for name, x in payload.tensors.items()}
    restored.updates(2, 4)
    assert_same_bits(payload.tensors, kept)


def test_before_the_first_update_there_is_no_state():
    for kind in ("adam", "sgd momentum", "adagrad"):
        payload = Part(kind=kind).payload()
        part = Part(kind=kind, seed=1).updates(0, 2)
        restore(part.layers, part.optimizer, [payload])
        assert_same_bits(everything(part.updates(0, 2)), everything(Part(kind=kind).updates(0, 2)))


def groups_of(part: Part, weights: dict, biases: dict) -> Part:
    """The same layers under an optimizer with two groups."""
    named = [(n, p) for n, p in named_tensors(part.layers).items()]
    part.optimizer = optim.AdamW(
        [{"params": [p for n, p in named if "weight" in n], **weights},
         {"params": [p for n, p in named if "bias" in n], **biases}]
    )  # fmt: skip
    return part


WEIGHTS, BIASES = {"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.01, "weight_decay": 0.0}


def test_groups_with_settings_of_their_own():
    whole = groups_of(Part(), WEIGHTS, BIASES).updates(0, 2)
    payload = whole.payload()
    going_on = everything(whole.updates(2, 4))
    found = {}
    for indices in CUTS[2]:
        part = groups_of(Part(indices, seed=1), {}, {"lr": 3.0})
        restore(part.layers, part.optimizer, [payload])
        assert [group["lr"] for group in part.optimizer.param_groups] == [0.1, 0.01]
        assert [group["weight_decay"] for group in part.optimizer.param_groups] == [0.01, 0.0]
        assert [group["betas"] for group in part.optimizer.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
        found |= everything(part.updates(2, 4))
    assert_same_bits(found, going_on)
    # In one group they cannot be what they were.
    one = Part(kind="adamw").updates(0, 1)
    assert_refused(one, [payload], r"0\.bias was saved with lr=0\.01, and another .* with 0\.1; put them into groups")


def test_one_group_can_become_two():
    payload = Part(kind="adamw", lr=0.3).updates(0, 2).payload()
    part = groups_of(Part(seed=1), {}, {"lr": 3.0})
    restore(part.layers, part.optimizer, [payload])
    assert {group["lr"] for group in part.optimizer.param_groups} == {0.3}


def test_settings_come_back_in_their_own_form():
    part = Part(kind="adam lr as a tensor", lr=torch.tensor(0.5), betas=(0.5, 0.75))
    payload = Part(kind="adam lr as a tensor", lr=torch.tensor(0.25), betas=(0.8, 0.9)).updates(0, 2).payload()
    restore(part.layers, part.optimizer, [payload])
    (group,) = part.optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert group["betas"] == (0.8, 0.9)
    assert type(group["betas"]) is tuple
    plain = Part(kind="adam")
    restore(plain.layers, plain.optimizer, [payload])
    assert (type(plain.optimizer.param_groups[0]["lr"]), plain.optimizer.param_groups[0]["lr"]) == (float, 0.25)


def test_an_optimizer_under_a_schedule_of_torchs_own():
    def scheduled(part):
        return part, optim.lr_scheduler.StepLR(part.optimizer, 1, 0.5)

    part, schedule = scheduled(Part())
    part.updates(0, 2)
    schedule.step()
    payload = part.payload()
    other, _ = scheduled(Part(seed=1))
    calls = []
    other.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    restore(other.layers, other.optimizer, [payload])
    assert calls == []  # finding out what the optimizer keeps is no update
    assert other.optimizer.param_groups[0]["lr"] == 0.005
    assert_same_bits(everything(other.updates(2, 4)), everything(part.updates(2, 4)))
    assert_refused(Part(), [payload], "the optimizer's setting initial_lr of 0.weight is 0.01 there and None here")


class Half(optim.SGD):
    """An optimizer of a user's own, with a setting that is in no group and a state that is no tensor."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.factor = factor

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self.factor
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_of_a_users_own():
    parts = [Part(seed=seed) for seed in (0, 1)]
    for part in parts:
        part.optimizer = Half([p for layer in part.layers.values() for p in layer.parameters()], 0.5)
    payload = parts[0].updates(0, 2).payload()
    restore(parts[1].layers, parts[1].optimizer, [payload])
    assert_same_bits(everything(parts[1].updates(2, 4)), everything(parts[0].updates(2, 4)))
    assert {state["count"] for state in parts[1].optimizer.state.values()} == {4}
    assert_refused(Part(), [payload], "it was saved by the optimizer Half, and this is Adam")


def test_empty_groups_take_the_settings():
    payload = Part(lr=0.7, betas=(0.1, 0.2)).updates(0, 1).payload()
    part = Part([4])  # a layer without parameters
    restore(part.layers, part.optimizer, [payload])
    (group,) = part.optimizer.param_groups
    assert (group["params"], group["lr"], group["betas"]) == ([], 0.7, (0.1, 0.2))
    assert_refused(
        part, [changed(payload, scalars=set_setting("lr", "x"))], "setting lr of a group without parameters is 'x'"
    )
    # Where nothing has settings there are none to take.
    nothing = unpack(pack(*collect({4: nn.ReLU()}, Part([4]).optimizer)))
    other = Part([4], lr=0.3)
    restore(other.layers, other.optimizer, [nothing])
    assert other.optimizer.param_groups[0]["lr"] == 0.3


def test_missing_layers_are_named():
    saved = [Part(indices).updates(0, 1).payload() for indices in CUTS[4]]
    part = Part(seed=1).updates(0, 1)
    assert_refused(part, saved[:1], "^layers 1, 2, 3, 4, 5, 6, 7, 8 missing; what was given has layer 0$")
    assert_refused(part, [saved[0], saved[2], saved[3]], "^layers 1, 2, 3, 4 missing; .* has layers 0, 5, 6, 7, 8$")
    assert_refused(part, saved[:3], "^layers 7, 8 missing; what was given has layers 0, 1, 2, 3, 4, 5, 6$")
    assert_refused(part, [], "^layers 0, 1, 2, .* missing; what was given has no layer$")
    # What is said to be there and is not.
    assert_refused(part, [changed(Part().payload(), drop=r"3\.bias")], "^layer 3 missing")
    # A layer without parameters is missed too.
    assert_refused(Part([3, 4, 5]), [Part([3, 5]).payload()], "^layer 4 missing; what was given has layers 3, 5$")
    many = Part([])
    many.layers = {index: nn.ReLU() for index in range(30)}
    with pytest.raises(PayloadError, match=r"^layers 0, 1, .*, 19, \.\.\. missing"):
        restore(many.layers, many.optimizer, [])


def test_a_payload_may_hold_more_than_is_needed():
    payload = Part().updates(0, 2).payload()
    part = Part([2, 3], seed=1)
    restore(part.layers, part.optimizer, [payload])
    assert_same_bits(everything(part), everything(Part([2, 3]).updates(0, 2)))


def set_setting(key, value):
    def change(scalars):
        for entry in scalars["optimizer"]["parameters"].values():
            entry["group"][key] = value

    return change


def drop_setting(scalars):
    for entry in scalars["optimizer"]["parameters"].values():
        del entry["group"]["eps"]


def set_entry(value):
    return lambda scalars: scalars["optimizer"]["parameters"].update({"3.weight": value})


def set_state(**values):
    return lambda scalars: scalars["optimizer"]["parameters"]["3.weight"]["state"].update(values)


BAD = {
    "shape": ({"tensors": {"3.weight": torch.ones(5, 3)}}, r"3\.weight is \(5, 3\) float32 there and \(3, 5\) float32"),
    "size": ({"tensors": {"3.bias": torch.ones(4)}}, r"3\.bias is \(4,\) float32 there and \(3,\) float32 here"),
    "dtype": ({"tensors": {"3.bias": torch.ones(3).double()}}, r"3\.bias is \(3,\) float64 there and \(3,\) float32 "),
    "extra tensor": ({"tensors": {"3.scale": torch.ones(3)}}, r"3\.scale is there and not here: another model"),
    "missing moment": ({"drop": "optimizer/3.weight/exp_avg_sq"},
                       r"of 3\.weight has \['exp_avg', 'step'\], where this optimizer keeps \['exp_avg', 'exp_avg_sq'"),
    "other moment": ({"tensors": {"optimizer/3.weight/sum": torch.ones(3, 5)}}, r"state of 3\.weight has .*'sum'"),
    "moment's shape": ({"tensors": {"optimizer/3.weight/exp_avg": torch.ones(5, 3)}},
                       r"exp_avg of 3\.weight is \(5, 3\) float32 there and \(3, 5\) float32 here"),
    "moment's dtype": ({"tensors": {"optimizer/3.weight/exp_avg": torch.ones(3, 5).half()}},
                       r"exp_avg of 3\.weight is \(3, 5\) float16 there"),
    "step's shape": ({"tensors": {"optimizer/3.weight/step": torch.ones(1)}}, r"step of 3\.weight is \(1,\) float32 "),
    "step as a number": ({"scalars": set_state(step=3)}, r"step of 3\.weight is of another kind"),
    "moment as a list": ({"scalars": set_state(exp_avg=[1])}, r"exp_avg of 3\.weight is of another kind"),
    "no optimizer": ({"scalars": lambda s: s.pop("optimizer")}, "a payload holds no optimizer's state"),
    "optimizer as a list": ({"scalars": lambda s: s.update(optimizer=[])}, "holds no optimizer's state"),
    "parameters as a list": ({"scalars": lambda s: s["optimizer"].update(parameters=[])}, "holds no optimizer's state"),
    "other class": ({"scalars": lambda s: s["optimizer"].update({"class": "AdamW"})},
                    "it was saved by the optimizer AdamW, and this is Adam"),
    "no class": ({"scalars": lambda s: s["optimizer"].pop("class")}, "saved by the optimizer None, and this is Adam"),
    "no entry": ({"scalars": lambda s: s["optimizer"]["parameters"].pop("3.weight")},
                 r"nothing was saved of the optimizer's state of 3\.weight"),
    "entry as a number": ({"scalars": set_entry(3)}, r"entry of 3\.weight cannot be read"),
    "entry without a group": ({"scalars": set_entry({"state": {}})}, r"entry of 3\.weight cannot be read"),
    "group as a list": ({"scalars": set_entry({"state": {}, "group": []})}, r"entry of 3\.weight cannot be read"),
    "lr as text": ({"scalars": set_setting("lr", "0.1")}, r"setting lr of 0\.weight is '0\.1' there and 0\.01 here"),
    "lr as a switch": ({"scalars": set_setting("lr", True)}, "setting lr of 0.weight is True there"),
    "lr as an object": ({"scalars": set_setting("lr", {})}, "setting lr of 0.weight is {} there"),
    "betas too many": ({"scalars": set_setting("betas", [0.9, 0.9, 0.9])}, "setting betas of 0.weight"),
    "betas as a number": ({"scalars": set_setting("betas", 0.9)}, "setting betas of 0.weight"),
    "unknown setting": ({"scalars": set_setting("momentum", 0.9)}, "momentum of 0.weight is 0.9 there and None here"),
    "missing setting": ({"scalars": drop_setting}, "setting eps of 0.weight is None there and 1e-08 here"),
    "params as a setting": ({"scalars": set_setting("params", [1])}, "setting params of 0.weight"),
    "layers as text": ({"scalars": lambda s: s.update(layers="0123456789")}, "^layers 0, 1, .* has no layer$"),
    "layers of kinds": ({"scalars": lambda s: s.update(layers=[0, "1", [2], None, {}])}, "^layers 1, 2, .*missing"),
    "no layers": ({"scalars": lambda s: s.pop("layers")}, "^layers 0, 1, .* has no layer$"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(case):
    how, message = BAD[case]
    payload = Part().updates(0, 2).payload()
    part = Part(seed=1).updates(5, 8)
    assert_refused(part, [changed(payload, **how)], message)
    restore(part.layers, part.optimizer, [payload])  # without the fault it fits
    assert_same_bits(everything(part), {name: x for name, x in payload.tensors.items() if x.numel()})


@pytest.mark.parametrize("kind", ["adam", "adam lr as a tensor"])
def test_a_number_beyond_all_bounds_leaves_nothing_half_loaded(kind):
    payload = Part(kind=kind).updates(0, 2).payload()
    part = Part(kind=kind, seed=1).updates(5, 8)
    assert_refused(part, [changed(payload, scalars=set_setting("lr", 10**400))], "lr")


def test_another_model_is_refused():
    payload = Part().payload()
    wide = Part()
    wide.layers = {i: nn.Linear(5, 4) if isinstance(m, nn.Linear) else m for i, m in wide.layers.items()}
    wide.optimizer = optim.Adam([p for layer in wide.layers.values() for p in layer.parameters()])
    assert_refused(wide, [payload], r"0\.weight is \(3, 5\) float32 there and \(4, 5\) float32 here: another model")
    half = Part()
    for layer in half.layers.values():
        layer.double()
    assert_refused(half, [payload], r"0\.weight is \(3, 5\) float32 there and \(3, 5\) float64 here: another model")
    bare = Part(kind="muon")
    bare.optimizer = optim.Adam([p for layer in bare.layers.values() for p in layer.parameters()], lr=0.01)
    assert_refused(bare, [payload], r"\.bias is there and not here: another model")


def test_two_payloads_may_agree_but_not_contradict_each_other():
    payload = Part().updates(0, 2).payload()
    part = Part(seed=1)
    nan = changed(payload, tensors={"3.bias": torch.tensor([torch.nan, 0.0, 1.0])})
    restore(part.layers, part.optimizer, [payload, payload, Part([2, 3]).updates(0, 2).payload()])
    restore(part.layers, part.optimizer, [nan, copy.deepcopy(nan)])
    part = Part(seed=1).updates(0, 1)
    assert_refused(part, [payload, nan], r"two payloads have different values of 3\.bias")
    negative = changed(payload, tensors={"3.bias": torch.tensor([0.0, 0.0, 1.0])})
    positive = changed(payload, tensors={"3.bias": torch.tensor([-0.0, 0.0, 1.0])})
    assert_refused(part, [positive, negative], r"two payloads have different values of 3\.bias")
    moment = changed(payload, tensors={"optimizer/3.bias/step": torch.tensor(9.0)})
    assert_refused(part, [payload, moment], "different values of optimizer/3.bias/step")
    assert_refused(part, [payload, changed(payload, scalars=set_setting("lr", 0.5))], "different settings of 0.weight")


def test_what_belongs_to_a_rank_may_differ():
    payload = Part().updates(0, 2).payload()
    others = [
        changed(payload, tensors={"history/losses": torch.ones(n), "random/0/torch": torch.ones(n)}) for n in (1, 2)
    ]
    part = Part(seed=1)
    restore(part.layers, part.optimizer, others)
    assert_same_bits(everything(part), everything(Part().updates(0, 2)))


def test_tied_parameters_are_saved_once():
    def tied(seed):
        part = Part([0, 1, 2], seed=seed)
        part.layers[2].weight = part.layers[0].weight
        unique = dict.fromkeys(p for layer in part.layers.values() for p in layer.parameters())
        part.optimizer = optim.Adam([{"params": list(unique)}], lr=0.01)
        return part

    part = tied(0).updates(0, 2)
    payload = part.payload()
    assert sorted(n for n in payload.tensors if "/" not in n) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias"]
    assert named_tensors({index: part.layers[index] for index in (2, 1, 0)}).keys() == named_tensors(part.layers).keys()
    other = tied(1)
    restore(other.layers, other.optimizer, [payload])
    assert other.layers[2].weight is other.layers[0].weight
    assert_same_bits(everything(other.updates(2, 4)), everything(part.updates(2, 4)))
    assert_refused(Part([0, 1, 2]), [payload], "^layer 2 missing")


def test_buffers_and_frozen_parameters_are_carried():
    def normalised(seed):
        part = Part([0, 1], seed=seed)
        part.layers[1] = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
        part.layers[1][1].weight.requires_grad_(False)
        part.layers[1][0](part.layers[0](torch.randn(8, 5)))
        trained = [p for layer in part.layers.values() for p in layer.parameters() if p.requires_grad]
        part.optimizer = optim.SGD(trained, lr=0.1)
        return part

    part, other = normalised(0), normalised(1)
    payload = part.payload()
    assert payload.tensors["1.0.num_batches_tracked"].item() == 1
    assert payload.tensors["1.0.num_batches_tracked"].shape == ()
    assert "1.1.weight" not in payload.scalars["optimizer"]["parameters"]
    other.layers[1][0](torch.randn(4, 3))
    restore(other.layers, other.optimizer, [payload])
    names = {"1.0.running_mean", "1.0.running_var", "1.0.num_batches_tracked", "1.1.weight"}
    assert names < everything(part).keys()
    assert_same_bits(everything(other), everything(part))
    assert_refused(normalised(2), [changed(payload, drop="1.0.running_var")], "^layer 1 missing")


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, but not where a cache line starts."""
    buffer = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64 + 8
    view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 64 == 8
    return view


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd momentum"])
def test_what_is_loaded_is_aligned_and_shares_nothing_with_the_payload(kind):
    payload = Part(kind=kind).updates(0, 2).payload()
    payload = Payload({name: unaligned(x) for name, x in payload.tensors.items()}, *payload[1:])
    part = Part(kind=kind, seed=1)
    restore(part.layers, part.optimizer, [payload])
    loaded = [*named_tensors(part.layers).values()]
    loaded += [x for state in part.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert len(loaded) >= 32
    assert all(x.data_ptr() % 64 == 0 for x in loaded)
    assert_same_bits(everything(part), everything(Part(kind=kind).updates(0, 2)))


class Odd(nn.Module):
    def get_extra_state(self):
        return {"a": 1}


def test_what_cannot_be_saved_is_named():
    part = Part([0, 1])
    with pytest.raises(ValueError, match="layer 1 has a state '_extra_state' that is no tensor"):
        collect({**part.layers, 1: Odd()}, part.optimizer)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3, 5\) of no layer here"):
        collect({0: part.layers[0]}, part.optimizer)
    part.updates(0, 1).optimizer.state[part.layers[1].bias]["what"] = {1, 2}
    with pytest.raises(ValueError, match=r"the optimizer's what of 1\.bias is a set; it cannot be saved"):
        collect(part.layers, part.optimizer)
    with pytest.raises(ValueError, match="the optimizer's lr=inf is no plain value"):
        hyper_parameters({"lr": float("inf"), "params": []})
    with pytest.raises(ValueError, match="the optimizer's f=<"):
        hyper_parameters({"f": print, "params": []})


def test_all_of_torchs_own_settings_can_be_saved():
    for kind in OPTIMIZERS:
        (group,) = Part(kind=kind).optimizer.param_groups
        assert hyper_parameters(group).keys() == group.keys() - {"params"}


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([{"updates": 2, "iterations": 2}] * 2, None),
        ([{"updates": 2, "iterations": 2}, {"updates": 3, "iterations": 3}], "not of one moment: updates 2, 3"),
        ([{"iterations": 2}], "not of one moment: updates None"),
        ([{"updates": "x", "iterations": 2}], "not of one moment: updates 'x'"),
        ([{"updates": -5, "iterations": 2}], "not of one moment: updates -5"),
        ([{"updates": 1.5, "iterations": 2}], "not of one moment: updates 1.5"),
        ([{"updates": True, "iterations": 2}], "not of one moment: updates True"),
        ([{"updates": 2, "iterations": 10**30}], "not of one moment: iterations 1"),
        ([{"updates": 3, "iterations": 2}], "3 updates after 2 iterations"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, message):
    payloads = [Payload({}, scalars, "") for scalars in counts]
    if message is None:
        assert counts_of(payloads) == (2, 2)
        return
    with pytest.raises(PayloadError, match=re.escape(message)):
        counts_of(payloads)
