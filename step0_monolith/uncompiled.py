"""torch's optimizers without what they do for torch.compile, whose parts take each process most of a second to load."""

import inspect
from functools import cache

import torch
from torch.optim import Optimizer

# What torch wraps so that torch.compile does not look inside.
WRAPPED = ("step", "add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """A class of the same name and arithmetic as `kind`, whose instances must not be compiled or be `differentiable`.

    Why: the first call of a wrapper imports torch._dynamo, some 800 modules, which no program of this course uses.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in WRAPPED}
    # The wrapper of `step` also switches autograd off.
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)
