"""What training must not lose, keyed by layer: whoever owns a layer can take its part, at any number of ranks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from step0_monolith.payload import Payload, PayloadError, is_scalar

OWN = ("history/", "random/")  # what begins so is a rank's own, and of no layer
Layers = Mapping[int, nn.Module]  # by global index
MAX_SETTING = 1e38  # what fits into any of torch's number types that an optimizer's setting may have


class State(NamedTuple):
    """tensors: `3.weight` and `optimizer/3.weight/exp_avg`, copies on the CPU; scalars: the rest, as JSON has it."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]


def named_tensors(layers: Layers) -> dict[str, Tensor]:
    """Parameters and persistent buffers by global name such as `3.weight`; one that is tied has its first name."""
    found, seen = {}, set()
    for index in sorted(layers):
        for name, value in layers[index].state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"layer {index} has a state {name!r} that is no tensor; a checkpoint cannot hold it")
            if id(value) not in seen:
                seen.add(id(value))
                found[f"{index}.{name}"] = value
    return found


def layer_of(name: str) -> int:
    """3, for `3.weight`."""
    return int(name.partition(".")[0])


def _owned(layers: Layers, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, dict]]:
    """Name, parameter and group of all that the optimizer updates. Raises ValueError for what no layer here has."""
    names = {id(value): name for name, value in named_tensors(layers).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} of no layer here")
            yield names[id(parameter)], parameter, group


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's group as scalars. Raises ValueError for one that is none."""
    found = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_scalar(value):
            raise ValueError(f"the optimizer's {name}={value!r} is no plain value; a checkpoint cannot hold it")
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def collect(layers: Layers, optimizer: torch.optim.Optimizer) -> State:
    """A snapshot of layers and optimizer: later updates do not change it.

    Raises ValueError for what a checkpoint cannot hold, by name.
    """
    tensors = {name: value.detach().cpu().clone() for name, value in named_tensors(layers).items()}
    parameters = {}
    for name, parameter, group in _owned(layers, optimizer):
        rest = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach().cpu().clone()
            elif is_scalar(value):
                rest[key] = value
            else:
                raise ValueError(f"the optimizer's {key} of {name} is a {type(value).__name__}; it cannot be saved")
        parameters[name] = {"group": hyper_parameters(group), "state": rest}
    own = {"class": type(optimizer).__name__, "parameters": parameters}
    return State(tensors, {"layers": sorted(layers), "optimizer": own})


def counts_of(payloads: Sequence[Payload]) -> tuple[int, int]:
    """Updates and iterations done, which all payloads must agree on. Raises PayloadError when they do not."""
    found = []
    for name in ("updates", "iterations"):
        values = [payload.scalars.get(name) for payload in payloads]
        if any(type(n) is not int or not 0 <= n < 2**53 for n in values) or len(set(values)) > 1:
            raise PayloadError(f"the payloads are not of one moment: {name} {', '.join(map(repr, values))}")
        found.append(values[0])
    if found[0] > found[1]:
        raise PayloadError(f"the payloads have {found[0]} updates after {found[1]} iterations")
    return found[0], found[1]


def restore(layers: Layers, optimizer: torch.optim.Optimizer, payloads: Sequence[Payload]) -> None:
    """Takes what these layers need out of the payloads, wherever in them it is.

    Everything is checked before anything is changed. Raises PayloadError that names a layer which is missing, or a
    tensor or setting that does not fit.
    """
    tensors = _merged(payloads)
    model = _check_model(layers, tensors, payloads)
    settings = _optimizer_entries(optimizer, payloads)
    states: list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]] = []
    groups: dict[int, dict[str, Any]] = {}
    for name, parameter, group in _owned(layers, optimizer):
        if name not in settings:
            raise PayloadError(f"nothing was saved of the optimizer's state of {name}")
        prefix = f"optimizer/{name}/"
        state = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
        state |= settings[name]["state"]
        template = template_of(optimizer, parameter, group)
        _check_state(name, state, template)
        states.append((parameter, state, template))
        _check_group(name, settings[name]["group"], group, groups.setdefault(id(group), settings[name]["group"]))
    common = next((entry["group"] for entry in settings.values()), None)
    for group in optimizer.param_groups:
        if not group["params"] and common is not None:
            _check_group("a group without parameters", common, group, common)
            groups[id(group)] = common
    with torch.no_grad():
        for name, value in model.items():
            value.copy_(tensors[name])
    for parameter, state, template in states:
        # Fresh copies: a tensor inside the payload may start at any byte.
        optimizer.state[parameter] = {
            key: x.clone().to(template[key].device) if isinstance(x, Tensor) else x for key, x in state.items()
        }
    for group in optimizer.param_groups:
        for key, value in groups.get(id(group), {}).items():
            group[key] = _as_before(value, group[key])


def _merged(payloads: Sequence[Payload]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for payload in payloads:
        for name, value in payload.tensors.items():
            if name.startswith(OWN):
                continue
            other = merged.setdefault(name, value)
            if other is not value and not _same(other, value):
                raise PayloadError(f"two payloads have different values of {name}")
    return merged


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _check_model(layers: Layers, tensors: Mapping[str, Tensor], payloads: Sequence[Payload]) -> dict[str, Tensor]:
    here = named_tensors(layers)
    there = [layer for payload in payloads for layer in _layers_of(payload)]
    missing = sorted({index for index in layers if index not in there} | {layer_of(n) for n in here.keys() - tensors})
    if missing:
        raise PayloadError(f"{_numbers('layer', missing)} missing; what was given has {_numbers('layer', there)}")
    for name, value in here.items():
        saved = tensors[name]
        if (saved.shape, saved.dtype) != (value.shape, value.dtype):
            raise PayloadError(f"{name} is {_kind(saved)} there and {_kind(value)} here: another model")
    extra = [n for n in tensors if n not in here and n.partition(".")[0] in {str(i) for i in layers}]
    if extra:
        raise PayloadError(f"{extra[0]} is there and not here: another model")
    return here


def _layers_of(payload: Payload) -> list[int]:
    layers = payload.scalars.get("layers")
    return [index for index in layers if isinstance(index, int)] if isinstance(layers, list) else []


def _kind(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return f"no {noun}"
    some = ", ".join(map(str, sorted(set(numbers))[:20])) + (", ..." if len(set(numbers)) > 20 else "")
    return f"{noun}{'' if len(set(numbers)) == 1 else 's'} {some}"


def _optimizer_entries(optimizer: torch.optim.Optimizer, payloads: Sequence[Payload]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for payload in payloads:
        saved = payload.scalars.get("optimizer")
        if not isinstance(saved, dict) or not isinstance(saved.get("parameters"), dict):
            raise PayloadError("a payload holds no optimizer's state")
        if saved.get("class") != type(optimizer).__name__:
            raise PayloadError(
                f"it was saved by the optimizer {saved.get('class')}, and this is {type(optimizer).__name__}"
            )
        for name, entry in saved["parameters"].items():
            if not isinstance(entry, dict) or not all(isinstance(entry.get(k), dict) for k in ("group", "state")):
                raise PayloadError(f"the optimizer's entry of {name} cannot be read")
            if entries.setdefault(name, entry) != entry:
                raise PayloadError(f"two payloads have different settings of {name}")
    return entries


def template_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping) -> dict[str, Any]:
    """What the optimizer keeps for such a parameter, found by letting one of its class update a copy once."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(twin)
    fresh = type(optimizer).__new__(type(optimizer))
    # What a class of the user's own needs; not a schedule's `step`, which would update the original, and no hooks.
    own = {name: x for name, x in vars(optimizer).items() if name != "step" and not name.startswith("_optimizer_")}
    fresh.__dict__.update(own)
    fresh.__setstate__(
        {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": [{**group, "params": [twin]}]}
    )
    fresh.step()
    return dict(fresh.state[twin])


def _check_state(name: str, state: Mapping[str, Any], template: Mapping[str, Any]) -> None:
    """A parameter that was never updated has no state; else there must be what the optimizer expects."""
    if state and state.keys() != template.keys():
        raise PayloadError(
            f"the optimizer's state of {name} has {sorted(state)}, where this optimizer keeps {sorted(template)}"
        )
    for key, value in state.items():
        wanted = template[key]
        if isinstance(wanted, Tensor) != isinstance(value, Tensor):
            raise PayloadError(f"the optimizer's {key} of {name} is of another kind than this optimizer keeps")
        if isinstance(wanted, Tensor) and (wanted.shape, wanted.dtype) != (value.shape, value.dtype):
            raise PayloadError(f"the optimizer's {key} of {name} is {_kind(value)} there and {_kind(wanted)} here")


def _check_group(name: str, saved: Mapping[str, Any], group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if saved != first:
        key = next(k for k in {**saved, **first} if saved.get(k) != first.get(k))
        raise PayloadError(
            f"{name} was saved with {key}={saved.get(key)!r}, and another parameter of its group here with "
            f"{first.get(key)!r}; put them into groups of their own"
        )
    here = hyper_parameters(group)
    for key in here.keys() | saved.keys():
        if key not in saved or key not in here or not _alike(saved[key], here[key]):
            raise PayloadError(
                f"the optimizer's setting {key} of {name} is {saved.get(key)!r} there and {here.get(key)!r} here"
            )


def _alike(a: object, b: object) -> bool:
    """Whether a setting can take the other's place: numbers for numbers, lists of one length for each other."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return _kind_of(a) is not None and _kind_of(a) == _kind_of(b)


def _kind_of(value: object) -> str | None:
    if value is None or isinstance(value, bool):
        return "switch"
    if isinstance(value, int | float):
        return "number" if abs(value) <= MAX_SETTING else None
    return "text" if isinstance(value, str) else None


def _as_before(value: Any, before: Any) -> Any:
    """A saved setting in the form that the optimizer had it in."""
    if isinstance(before, Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) else value
