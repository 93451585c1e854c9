"""What `run.prepare` took over, and all of its state as one tree."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.prepared.modes import Modes, extra_holders, read_extra
from fallow.worker.prepared.state import decode_onto, device_of, encode, named_parameters, plain_name
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.exact import Exact

_ACTING = ("step", "update", "unscale_", "update_parameters")
"""Methods that change state once per step."""


class ModelNames(NamedTuple):
    """Where a module's `state_dict` differs from the module's tensors, each of which is exported once."""

    transient: frozenset[str] = frozenset()
    "buffers that it leaves out (`persistent=False`)"
    aliases: Mapping[str, Sequence[str]] = {}
    "name under which a tied tensor is exported -> its further names"


class Prepared:
    """The objects of one run, in the order in which they were prepared."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stateful_objects: list[Any] = []
        "schedulers, scalers, averages, and whatever has state_dict and load_state_dict"
        self.dicts: list[dict[Any, Any]] = []
        "dicts of plain values and tensors"
        self.generators: list[Any] = []
        "random generators; not part of the state, because each shard and each step seeds them"
        self.arithmetic = Arithmetic()
        "how the run's gradients are added up"
        self.modes = Modes(self.modules)
        self._buffer_places: list[tuple[dict[str, torch.Tensor | None], str]] | None = None
        "dicts and keys under which buffers are found: a forward may put another tensor in a buffer's place"
        self._trainable: set[torch.Tensor] = set()
        "parameters that were trainable when prepared; one that is frozen later keeps its place in all sums"

    def add(self, thing: Any) -> None:
        """Take over one object (not a DataLoader).

        Raises:
            FallowError: it has no state that can be handed to another member, or it was given before.
        """
        prepared_objects = [*self.modules, *self.optimizers, *self.stateful_objects, *self.dicts, *self.generators]
        kind = type(thing).__name__
        if any(thing is other for other in prepared_objects):
            raise FallowError(f"prepare: {kind} was given twice; prepare each object once")
        if isinstance(thing, nn.Module):
            _check_module(thing)
            _check_tensors(thing)
        if isinstance(thing, nn.Module) and not isinstance(thing, torch.optim.swa_utils.AveragedModel):
            encode(read_extra([thing]), f"prepare: {kind}")
            self._buffer_places = None
            self.modules.append(thing)
            self._trainable |= {parameter for parameter in thing.parameters() if parameter.requires_grad}
        elif rng.is_generator(thing):
            self.generators.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers.append(thing)
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self.stateful_objects.append(thing)
        elif isinstance(thing, dict):
            encode(dict(thing), f"prepare: {kind}")
            self.dicts.append(thing)
        else:
            advice = "add both, put its values into a dict, or do not prepare it"
            if isinstance(thing, nn.Parameter):
                advice = "prepare nn.ParameterList([parameter]), which holds it"
            raise FallowError(
                f"prepare: {kind} has no state_dict and load_state_dict, so its state cannot be "
                f"handed to a member that joins; {advice}",
                Exit.DATA,
            )

    def acting_objects(self) -> list[tuple[Any, list[str]]]:
        """Objects that change their state once per step, and the names of the methods that do it."""
        things = [*self.optimizers, *self.stateful_objects]
        acting_methods = (
            (thing, [name for name in _ACTING if callable(getattr(thing, name, None))]) for thing in things
        )
        return [(thing, names) for thing, names in acting_methods if names]

    @property
    def reproducible(self) -> bool:
        """True if gradients are summed so that the membership does not show in the result."""
        return isinstance(self.arithmetic, Exact)

    # ------------------------------------------------------------------------------------------------ parameters

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trainable, or were when they were prepared, with names, in order, shared ones once."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named_parameters(self.modules):
            if self._trains(parameter):
                named.setdefault(id(parameter), (name, parameter))
        return list(named.values())

    def _trains(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad or tensor in self._trainable

    def buffers(self) -> list[torch.Tensor]:
        """All buffers of all modules, in order, shared ones once."""
        if self._buffer_places is None:
            parts = (part for module in self.modules for part in module.modules())
            self._buffer_places = [(part._buffers, name) for part in parts for name in part._buffers]
        buffers = {id(buffer): buffer for inside, name in self._buffer_places if (buffer := inside[name]) is not None}
        return list(buffers.values())

    def weights(self) -> list[torch.Tensor]:
        """Parameters (frozen ones too) and buffers, as they come in `export`; a generation's checksum is over them."""
        return [tensor for module in self.modules for tensor in _named(module).values()]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def trained_weights(self) -> set[int]:
        """Numbers, among `weights`, of the parameters that prepared optimizers change."""
        optimized = {id(parameter) for group in self.groups() for parameter in group["params"]}
        return {number for number, tensor in enumerate(self.weights()) if id(tensor) in optimized}

    def devices(self) -> set[torch.device]:
        """Where the modules are."""
        return {tensor.device for tensor in self.weights()}

    @property
    def device(self) -> torch.device:
        """The accelerator on which the modules are, else the host."""
        return device_of(self.weights())

    # ----------------------------------------------------------------------------------------------------- state

    def plain_optimizers(self) -> set[int]:
        """Numbers of the optimizers that load a state by taking over, as they are, the tensors that fit."""
        return {number for number, optimizer in enumerate(self.optimizers) if _loads_plainly(optimizer)}

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Tensors in the state of all optimizers."""
        return encode([optimizer.state_dict()["state"] for optimizer in self.optimizers], "optimizers").tensors

    def export(self) -> dict[str, Any]:
        """The whole state as a tree for `state.encode`; tensors share memory with the live ones.

        Raises:
            Exception: a script's own object raised it.
        """
        return {
            "models": [{name: tensor.detach() for name, tensor in _named(module).items()} for module in self.modules],
            "groups": [_groups(optimizer, self._parameter_names()) for optimizer in self.optimizers],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "others": [thing.state_dict() for thing in self.stateful_objects],
            "dicts": [dict(values) for values in self.dicts],
        }

    def names(self) -> list[ModelNames]:
        """How each module's `state_dict` calls the tensors that `export` has."""
        return [_names_of(module) for module in self.modules]

    def load(self, state: dict[str, Any], received: Set[int] = frozenset()) -> None:
        """Put an exported state into the live objects, which may keep tensors of it.

        Args:
            state: as `export` made it. Tensors of modules may be on the host instead of their device.
            received: ids of tensors of it that share the live ones' memory: they are not copied.

        Raises:
            FallowError: it does not fit them.
            Exception: a script's own object raised it, which nobody but the script can explain.
        """
        try:
            for module, tensors in zip(self.modules, state["models"], strict=True):
                _load_module(module, tensors, received)
            for optimizer, groups, saved in zip(self.optimizers, state["groups"], state["optimizers"], strict=True):
                _regroup(optimizer, groups, self._parameter_names())
                if _loads_plainly(optimizer):
                    _load_plainly(optimizer, saved)
                else:
                    optimizer.load_state_dict(saved)
                _keep_strides(optimizer)
            for own, values in zip(self.dicts, state["dicts"], strict=True):
                values = decode_onto(encode(values, "dict"), encode(dict(own), "dict"))
                own.clear()
                own.update(values)
            stateful_pairs = list(zip(self.stateful_objects, state["others"], strict=True))
        except (KeyError, ValueError, RuntimeError) as error:
            raise FallowError(
                f"the run's state does not fit what this script prepared: {error}; "
                "use the same script, arguments and library versions in every allocation",
                Exit.DATA,
            ) from None
        for thing, saved in stateful_pairs:
            try:
                thing.load_state_dict(saved)
            except Exception as error:
                error.add_note(f"while this {type(thing).__name__} took over the run's state")
                raise

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in named_parameters(self.modules)}

    def layout(self) -> list[str]:
        """One line per tensor and object, for comparing a joiner with the run."""
        tensors = (
            f"model.{number}.{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            + " frozen" * (isinstance(tensor, nn.Parameter) and not self._trains(tensor))
            for number, module in enumerate(self.modules)
            for name, tensor in _named(module).items()
        )
        return [
            *tensors,
            # Not its groups: a script may add some on the way, of which a newcomer's has not come by.
            *(f"optimizer.{number} {type(optimizer).__name__}" for number, optimizer in enumerate(self.optimizers)),
            *extra_holders(self.modules),
            *(f"other.{number} {type(thing).__name__}" for number, thing in enumerate(self.stateful_objects)),
            *(f"dict.{number}" for number in range(len(self.dicts))),
        ]


def _groups(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> list[list[str]]:
    """Names of the parameters in each of its groups; those of no prepared module have none."""
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _regroup(optimizer: torch.optim.Optimizer, target_groups: list[list[str]], names: dict[torch.Tensor, str]) -> None:
    """Make the groups those of another member, whose script has added some, or of a checkpoint before that."""
    alike = sum(takewhile(bool, map(eq, _groups(optimizer, names), target_groups)))
    parameters = {name: parameter for parameter, name in names.items()}
    has_names = any("param_names" in group for group in optimizer.param_groups)
    del optimizer.param_groups[alike:]
    for group in target_groups[alike:]:
        params = [(name, parameters[name]) if has_names else parameters[name] for name in group]
        optimizer.add_param_group({"params": params})


def _check_module(module: nn.Module) -> None:
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        advice: str | None = None
        if kinds & {"DistributedDataParallel", "DataParallel"}:
            advice = "give the plain module: run.prepare takes the wrapper's place"
        elif kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            advice = "every member holds the whole model: give the plain module, not a sharded one"
        elif isinstance(part, nn.SyncBatchNorm):
            advice = "use BatchNorm, whose statistics are those of a shard and do not depend on the membership"
        elif any(map(nn.parameter.is_lazy, (*part.parameters(recurse=False), *part.buffers(recurse=False)))):
            advice = "run one forward before run.prepare, so that lazy layers have their shapes"
        if advice is not None:
            where = f"{type(module).__name__}.{name}" if name else type(module).__name__
            raise FallowError(f"prepare: {where} is a {type(part).__name__}: {advice}", Exit.DATA)


def _check_tensors(module: nn.Module) -> None:
    """Refuse tensors whose bytes cannot be sent, or not be put into a newcomer's."""
    for name, tensor in _named(module).items():
        kind, advice = "", "register the plain tensors that it is made of, or keep a constant in a plain attribute"
        if tensor.is_meta:
            kind, advice = "a meta", "give it memory and values first, or leave it out of the module"
        elif tensor.is_nested:
            kind = "a nested"
        elif tensor.is_quantized:
            kind = "a quantized"
        elif tensor.layout is not torch.strided:
            kind = f"a {str(tensor.layout).removeprefix('torch.')}"
        elif not tensor.is_contiguous() and 0 in tensor.stride():
            kind, advice = "an expanded", "expand it in forward(), or register a copy, as contiguous() makes it"
        if kind:
            raise FallowError(
                f"prepare: {type(module).__name__}.{name} is {kind} tensor, which cannot be handed to a member that "
                f"joins: {advice}",
                Exit.DATA,
            )


def signature_of(layout: list[str]) -> str:
    """SHA-256 of the layout."""
    return hashlib.sha256("\n".join(layout).encode()).hexdigest()


def _load_module(module: nn.Module, tensors: dict[str, torch.Tensor], received: Set[int]) -> None:
    own = _named(module)
    if own.keys() != tensors.keys():
        raise KeyError(", ".join(sorted(own.keys() ^ tensors.keys())))
    with torch.no_grad():
        for name, tensor in own.items():
            if id(tensors[name]) not in received:
                tensor.copy_(tensors[name], non_blocking=True)


def _loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
    hooks = [*optimizer._optimizer_load_state_dict_pre_hooks, *optimizer._optimizer_load_state_dict_post_hooks]
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not hooks


def _load_plainly(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state and keep its dtypes. torch would cast it to the parameter's (bfloat16 parameters, float32 state):
    that costs memory, and reads what may not have arrived yet."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cast = {
        number: {key: value for key, value in entry.items() if _would_be_cast(key, value, params[number])}
        for number, entry in saved["state"].items()
        if number in range(len(params)) and isinstance(entry, dict)  # others are the optimizer's own
    }
    instead = {number: torch.empty(0, dtype=params[number].dtype, device=params[number].device) for number in cast}
    state = {
        number: {**entry, **dict.fromkeys(cast[number], instead[number])} if number in cast else entry
        for number, entry in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})
    for number, entry in cast.items():
        optimizer.state[params[number]].update({key: value.to(params[number].device) for key, value in entry.items()})


def _would_be_cast(key: Any, value: Any, parameter: torch.Tensor) -> bool:
    return key != "step" and isinstance(value, torch.Tensor) and value.dtype != parameter.dtype


def _keep_strides(optimizer: torch.optim.Optimizer) -> None:
    """State travels row by row, but fused kernels go through it and its parameter as both lie in memory."""
    for parameter, entry in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(entry, dict) or parameter.is_contiguous():
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                lying = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if lying.stride() != value.stride():
                    entry[key] = lying.copy_(value)


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {plain_name(name): tensor for name, tensor in named.items()}


def _names_of(module: nn.Module) -> ModelNames:
    transient = frozenset(
        plain_name(".".join(filter(None, (within, name))))
        for within, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    )
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = defaultdict[torch.Tensor, list[str]](list)
    for name, tensor in every:
        names[tensor].append(plain_name(name))
    return ModelNames(
        transient,
        {own: [name for name in further if name != own and name not in transient] for own, *further in names.values()},
    )
