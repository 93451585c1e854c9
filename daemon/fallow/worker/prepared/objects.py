"""What `run.prepare` took over: who acts when, and all of its state as one tree."""

from __future__ import annotations

import copyreg
import hashlib
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.handover import extra_state
from fallow.worker.handover.state import plain_name, tensors_in
from fallow.worker.prepared.modes import Modes
from fallow.worker.prepared.scaling import Scaling
from fallow.worker.reduction.arithmetic import Arithmetic, Floating, all_zero
from fallow.worker.reduction.exact import Exact

_GATED = ("step", "update", "unscale_", "update_parameters")
"""Methods that change state once per step; in a void body they do nothing."""


class _Home(NamedTuple):
    """Where a buffer is found."""

    inside: dict[str, torch.Tensor | None]
    name: str
    path: str
    "its name in messages"
    statistics: bool
    "of a layer that normalizes: a forward changes it, and only one in evaluation reads it"


class ModelNames(NamedTuple):
    """Where a module's `state_dict` differs from the module's tensors, each of which is exported once."""

    transient: frozenset[str] = frozenset()
    "buffers that it leaves out (`persistent=False`)"
    aliases: Mapping[str, str] = {}
    "further names of tied tensors -> the name under which the tensor is exported"


class Gate:
    """Tells prepared objects whether a call counts now. One per run, set by the loop."""

    def __init__(self) -> None:
        self.open = True
        self.in_body = False
        self.single = True
        "the step has one shard only, so a closure may run the model again"
        self.stepped = False
        "an optimizer's step was called in this body, in a void one too"
        self.acted = False
        "something has changed its state in this body"
        self.acting = 0
        "prepared objects that are at work just now, one inside the other"
        self.called = False
        "something that acts was called in this body, or in its phase, in a void one too"
        self.calls: set[tuple[int, float]] = set()
        "what was called to act in this body, in a void one too: (number of the method, on or with what)"
        self.steps = 0
        "optimizer steps that have acted in this body"
        self.seed_step: Callable[[int], None] = lambda number: None
        "puts random numbers to where they begin in that step of this body, on every member alike"
        self.between: Callable[[], None] = lambda: None
        "called before something acts outside of bodies"
        self.untrained = False
        "the last loop is over, and no body of it has made a backward"
        self.settle: Callable[[], bool] = lambda: True
        "asked before a closure: is the whole state here? False: it will not come, the body is void"
        self.in_backward = False
        self.trained = False
        "a backward has begun in this body"
        self.handmade = False
        "before that, an optimizer was to step on gradients"
        self.gathered: set[int] = set()
        "ids of parameters with a gradient from before this step"
        self.refusal: FallowError | None = None
        "what was refused in this body; it counts even if the body catches the exception"

    def refuse(self, message: str) -> FallowError:
        """An error to be raised in the user's body, and again by the loop if the body goes on."""
        self.refusal = FallowError(message, Exit.DATA)
        return self.refusal


class Prepared:
    """The objects of one run, in the order in which they were prepared."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.others: list[Any] = []
        self.generators: list[Any] = []
        "of random numbers; no part of the state, for each body seeds them"
        self.scaling = Scaling()
        "which GradScaler belongs to which loss and optimizer"
        self.arithmetic: Arithmetic = Floating()
        "how the run's gradients are added up"
        self._homes: list[_Home] | None = None
        "where buffers are found: a forward may put another tensor in a buffer's place"
        self._trainable: dict[int, nn.Parameter] = {}
        "by id: what was trainable when it was prepared; what the script freezes later keeps its place in all sums"
        self.order: list[int] = []
        "indices of `parameters()`, as a backward gave their gradients; the same on all members"
        self.modes = Modes(lambda: self.modules)
        self.acts: list[int] = []
        "how often each object that acts has done so in bodies of this generation"

    def add(self, thing: Any) -> None:
        """Take over one object (not a DataLoader).

        Raises:
            FallowError: it is no module and no generator, and has no state_dict and load_state_dict.
        """
        known = [*self.modules, *self.optimizers, *self.others, *self.generators]
        if any(thing is other for other in known):
            raise FallowError(f"prepare: {type(thing).__name__} was given twice; prepare each object once")
        averaged = isinstance(thing, torch.optim.swa_utils.AveragedModel)
        self._homes = None
        if isinstance(thing, nn.Module):
            _check_module(thing)
        if isinstance(thing, nn.Module) and not averaged:
            extra_state.pack(extra_state.read([thing]), f"prepare: {type(thing).__name__}")
            self.modules.append(thing)
            self._trainable |= {id(parameter): parameter for parameter in thing.parameters() if parameter.requires_grad}
            return
        if rng.is_generator(thing):
            self.generators.append(thing)
            return
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise FallowError(
                f"prepare: {type(thing).__name__} has no state_dict and load_state_dict, so its state cannot be "
                "handed to a member that joins; add both, or do not prepare it",
                Exit.DATA,
            )
        if isinstance(thing, torch.optim.Optimizer):
            self.optimizers.append(thing)
        else:
            self.others.append(thing)
        if isinstance(thing, torch.amp.GradScaler):
            self.scaling.scalers.append(thing)
        names = [name for name in _GATED if callable(getattr(thing, name, None))]
        if isinstance(thing, torch.optim.Optimizer):
            # On the instance, where schedulers patch `step` too. A bound method: they look for __func__.
            plain = thing.step
            gated = self._gated(thing, "step")
            if hasattr(plain, "_wrapped_by_lr_sched"):
                gated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or it wraps again and warns
            setattr(thing, "step", MethodType(gated, thing))  # noqa: B010  # mypy forbids assigning to a method
            setattr(thing, "add_param_group", self._unless_received(thing))  # noqa: B010
        elif names:
            # A subclass and not the instance: schedulers' state_dict() returns all of the instance's attributes.
            cls = type(thing)
            methods = {name: self._gated(thing, name) for name in names}
            body: dict[str, Any] = {
                "__slots__": (),
                "__module__": cls.__module__,
                "__reduce_ex__": _as_plain(cls),
                **methods,
            }
            if isinstance(thing, torch.amp.GradScaler):
                body["scale"] = self.scaling.noted(thing)
            thing.__class__ = type(cls.__name__, (cls,), body)

    def _gated(self, thing: Any, name: str) -> Callable[..., Any]:
        gate = self._gate
        inner = getattr(thing, name)
        is_optimizer = isinstance(thing, torch.optim.Optimizer)
        takes_step = name == "step" and isinstance(thing, torch.optim.Optimizer | torch.amp.GradScaler)
        acts, number = self.acts, len(self.acts)
        acts.append(0)

        def gated(_self: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate.in_body:
                gate.between()
            closure = args[0] if args else kwargs.get("closure")
            if is_optimizer and gate.in_body and callable(closure):
                return _with_closure(inner, gate, closure)
            if takes_step and not gate.acting:
                self.scaling.note_step(_stepped(thing, args, kwargs), None if is_optimizer else thing)
            if takes_step and gate.in_body:
                if gate.in_backward:
                    raise gate.refuse(
                        "an optimizer's step inside backward would use one shard's gradient: call step after backward"
                    )
                gate.stepped = True
                if not gate.trained:
                    gate.handmade = gate.handmade or _has_gradients(_stepped(thing, args, kwargs))
                if is_optimizer and gate.gathered and _holds(thing, gate.gathered):
                    raise gate.refuse(
                        "an optimizer's step on gradients that were gathered over several steps: they would be lost if "
                        "the membership changes; call zero_grad in each step, and for larger steps raise global_batch "
                        "in run.prepare"
                    )
            if takes_step and gate.untrained and not gate.in_body and _has_gradients(_stepped(thing, args, kwargs)):
                raise FallowError(
                    "an optimizer's step outside of the body, after a run.steps loop in which no body made a backward: "
                    "gradients are shared in bodies only, so each member would train by itself, on its own shards; "
                    "train in the body of `for batch in run.steps(loader):`, and neither make a list of it nor keep "
                    "its batches for later",
                    Exit.DATA,
                )
            if gate.in_body:
                gate.called = True
                if not gate.acting:
                    gate.calls.add((number, id(_stepped(thing, args, kwargs)) if takes_step else _place(thing, args)))
            if not gate.open:
                return None
            if gate.in_body:
                # Between two calls one member may be a change of the membership ahead of another.
                acts[number] += 1
                gate.acted = True
                if takes_step and not gate.acting:
                    gate.seed_step(gate.steps)
                    gate.steps += 1
            gate.acting += 1
            try:
                return inner(*args, **kwargs)
            finally:
                gate.acting -= 1

        return gated

    def _unless_received(self, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
        gate, add = self._gate, optimizer.add_param_group

        def gated(*args: Any, **kwargs: Any) -> None:
            # On the script's way to the members' place the group is there already, see `CatchUp`.
            if gate.open or gate.in_body:
                add(*args, **kwargs)
            if gate.in_body:
                strange = self.strangers()
                if strange:
                    raise gate.refuse(strange)

        return gated

    def strangers(self) -> str:
        """What to say of prepared optimizers that train what was not prepared; empty: there is nothing."""
        inside = {id(parameter) for module in self.modules for parameter in module.parameters()}
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        strange = sum(id(parameter) not in inside for parameter in held if parameter.requires_grad)
        if not strange:
            return ""
        return (
            f"a prepared optimizer holds {strange} parameters that belong to no prepared module, so their "
            "gradients would not be shared: run.prepare(model, optimizer, ...) with every module that is trained"
        )

    @property
    def reproducible(self) -> bool:
        """True if gradients are summed so that the membership does not show in the result."""
        return isinstance(self.arithmetic, Exact)

    # ------------------------------------------------------------------------------------------------ parameters

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trainable, or were when they were prepared, with names, in order, shared ones once."""
        seen: set[int] = set()
        named: list[tuple[str, nn.Parameter]] = []
        for number, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                if self._trains(parameter) and id(parameter) not in seen:
                    seen.add(id(parameter))
                    named.append((plain_name(f"model.{number}.{name}"), parameter))
        return named

    def _trains(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad or id(tensor) in self._trainable

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """All buffers of all modules with their names, in order, shared ones once."""
        found = ((home.path, home.inside[home.name]) for home in self._buffer_homes())
        return list({id(buffer): (path, buffer) for path, buffer in found if buffer is not None}.values())

    def buffers(self) -> list[torch.Tensor]:
        """The tensors of `named_buffers`."""
        return [buffer for _, buffer in self.named_buffers()]

    def statistics(self) -> set[int]:
        """Ids of buffers in which normalizing layers gather statistics: no backward looks at what is new there."""
        return {id(home.inside[home.name]) for home in self._buffer_homes() if home.statistics}

    def _buffer_homes(self) -> list[_Home]:
        if self._homes is None:
            self._homes = [
                _Home(
                    part._buffers,
                    name,
                    plain_name(".".join(filter(None, ("model", str(number), within, name)))),
                    isinstance(part, _NormBase),
                )
                for number, module in enumerate(self.modules)
                for within, part in module.named_modules()
                for name in part._buffers
            ]
        return self._homes

    def weights(self) -> list[torch.Tensor]:
        """Parameters (frozen ones too) and buffers: what the checksum of a generation is taken over."""
        return [*(p for module in self.modules for p in module.parameters()), *self.buffers()]

    def weight_tensors(self) -> list[torch.Tensor]:
        """What modules contribute to `export`, in its order."""
        return [tensor for module in self.modules for tensor in _module_tensors(module).values()]

    def trained_weights(self) -> list[int]:
        """Numbers, among `weight_tensors`, of the parameters that prepared optimizers change."""
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        weights = (tensor for module in self.modules for tensor in _named(module).values())
        return [number for number, tensor in enumerate(weights) if id(tensor) in held]

    def devices(self) -> set[torch.device]:
        """Where the modules are."""
        return {tensor.device for tensor in self.weights()}

    # ----------------------------------------------------------------------------------------------------- state

    def plain_optimizer_tensors(self) -> list[torch.Tensor]:
        """Tensors in the state of optimizers that load a state by taking the tensors over as they are."""
        return [
            value
            for optimizer in self.optimizers
            if _loads_plainly(optimizer)
            for entry in optimizer.state.values()
            for value in tensors_in(entry)
        ]

    def optimizer_pairs(self, state: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Live optimizer tensors beside those of a state that was loaded; None if they do not correspond."""
        live = list(tensors_in([optimizer.state_dict() for optimizer in self.optimizers]))
        loaded = list(tensors_in(state["optimizers"]))
        if [tensor.shape for tensor in live] != [tensor.shape for tensor in loaded]:
            return None
        return list(zip(live, loaded, strict=True))

    def export(self) -> dict[str, Any]:
        """The whole state as a tree for `state.encode`; tensors share memory with the live ones."""
        return {
            "models": [_module_tensors(module) for module in self.modules],
            "groups": [_groups(optimizer, self._names()) for optimizer in self.optimizers],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "others": [thing.state_dict() for thing in self.others],
            "arithmetic": self.arithmetic.export(),
        }

    def names(self) -> list[ModelNames]:
        """How each module's `state_dict` calls the tensors that `export` has."""
        return [_names_of(module) for module in self.modules]

    def load(self, state: dict[str, Any]) -> None:
        """Put an exported state into the live objects.

        Raises:
            FallowError: it does not fit them.
            Exception: a script's own object raised it, which nobody but the script can explain.
        """
        try:
            with torch.no_grad():
                for module, tensors in zip(self.modules, state["models"], strict=True):
                    own = _module_tensors(module)
                    if own.keys() != tensors.keys():
                        raise KeyError(", ".join(sorted(own.keys() ^ tensors.keys())))
                    for name, tensor in own.items():
                        if tensor.data_ptr() != tensors[name].data_ptr():  # else it was received in place
                            tensor.copy_(tensors[name])
            for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
                _regroup(optimizer, groups, self._names())
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
                if _loads_plainly(optimizer):
                    _keep_dtypes(optimizer, saved)
                _keep_strides(optimizer)
            self.arithmetic.load(state["arithmetic"])
            others = list(zip(self.others, state["others"], strict=True))
        except (KeyError, ValueError, RuntimeError) as error:
            raise FallowError(
                f"the run's state does not fit what this script prepared: {error}; "
                "use the same script, arguments and library versions in every allocation",
                Exit.DATA,
            ) from None
        for thing, saved in others:
            try:
                thing.load_state_dict(saved)
            except Exception as error:
                error.add_note(f"while this {type(thing).__name__} took over the run's state")
                raise

    def _names(self) -> dict[int, tuple[str, nn.Parameter]]:
        """All modules' parameters by id."""
        return {
            id(parameter): (plain_name(f"model.{number}.{name}"), parameter)
            for number, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
        }

    def layout(self) -> list[str]:
        """One line per tensor and object, for comparing a joiner with the run."""
        lines = [
            f"model.{number}.{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}".replace(" [", "[")
            + " frozen" * (isinstance(t, nn.Parameter) and not self._trains(t))
            for number, module in enumerate(self.modules)
            for name, t in _named(module).items()
        ]
        for number, optimizer in enumerate(self.optimizers):
            # Not its groups: a script may add some on the way, of which a newcomer's has not come by.
            lines.append(f"optimizer.{number} {type(optimizer).__name__}")
        lines += list(extra_state.holders(self.modules))
        lines += [f"other.{number} {type(thing).__name__}" for number, thing in enumerate(self.others)]
        return lines


def _holds(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """True if one of them has a gradient."""
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(id(parameter) in parameters and parameter.grad is not None for parameter in held)


def _as_plain(cls: Any) -> Callable[[Any, Any], Any]:
    """Copies, and what is saved whole, are the script's own: of the plain class, and act by themselves."""

    def reduce(self: Any, protocol: Any) -> Any:
        found = cls.__reduce_ex__(self, protocol)
        if isinstance(found, tuple) and found[1] == (type(self),):
            # What object's own does in older protocols: it does not insist on the class that the object has.
            return (copyreg._reconstructor, (cls, object, None), *found[2:])  # type: ignore[attr-defined]
        return found

    return reduce


def _stepped(thing: Any, args: Any, kwargs: Any) -> torch.optim.Optimizer:
    """Whom a call of `step` is for: an optimizer, or a scaler's first argument."""
    found: torch.optim.Optimizer = (
        thing if isinstance(thing, torch.optim.Optimizer) else args[0] if args else kwargs["optimizer"]
    )
    return found


def _place(thing: Any, args: Any) -> float:
    """Where a scheduler is told to go: `step(epoch + i / n)`. A metric is another thing, see `run.mean`."""
    told = isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau) and args
    return float(args[0]) if told and isinstance(args[0], int | float) else 0.0


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return not all_zero([gradient for gradient in gradients if gradient is not None])


def _groups(optimizer: torch.optim.Optimizer, names: dict[int, tuple[str, nn.Parameter]]) -> list[list[str]]:
    """Names of the parameters in each of its groups; those of no prepared module have none."""
    return [[names[id(p)][0] if id(p) in names else "" for p in group["params"]] for group in optimizer.param_groups]


def _regroup(
    optimizer: torch.optim.Optimizer, wanted: list[list[str]], names: dict[int, tuple[str, nn.Parameter]]
) -> None:
    """Make the groups those of another member, whose script has added some, or of a checkpoint before that."""
    have = _groups(optimizer, names)
    if have == wanted:
        return
    alike = next((n for n, (a, b) in enumerate(zip(have, wanted, strict=False)) if a != b), min(len(have), len(wanted)))
    known = dict(names.values())
    named = any("param_names" in group for group in optimizer.param_groups)
    del optimizer.param_groups[alike:]
    for group in wanted[alike:]:
        params = [(name, known[name]) for name in group]
        added = {"params": params if named else [parameter for _, parameter in params]}
        type(optimizer).add_param_group(optimizer, added)  # whatever the gate says


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
        elif any(isinstance(p, nn.UninitializedParameter) for p in part.parameters(recurse=False)):
            advice = "run one forward before run.prepare, so that lazy layers have their shapes"
        if advice is not None:
            where = f"{type(module).__name__}.{name}" if name else type(module).__name__
            raise FallowError(f"prepare: {where} is a {type(part).__name__}: {advice}", Exit.DATA)


def signature_of(layout: list[str]) -> str:
    """SHA-256 of the layout."""
    return hashlib.sha256("\n".join(layout).encode()).hexdigest()


def _loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
    hooks = [*optimizer._optimizer_load_state_dict_pre_hooks, *optimizer._optimizer_load_state_dict_post_hooks]
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not hooks


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loading casts state to the parameter's dtype (bfloat16 parameters, float32 state): take it as it was."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in saved["state"].items():
        live = optimizer.state[params[number]]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dtype != live[key].dtype:
                live[key] = value.to(live[key].device)


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


def _module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in _named(module).items()}


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {plain_name(name): tensor for name, tensor in named.items()}


def _names_of(module: nn.Module) -> ModelNames:
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in ((plain_name(name), tensor) for name, tensor in every):
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    transient = {
        plain_name(".".join(filter(None, (within, name))))
        for within, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    kept = {name: own for name, own in aliases.items() if name not in transient}
    return ModelNames(frozenset(transient), kept)


def _with_closure(inner: Callable[..., Any], gate: Gate, closure: Callable[[], Any]) -> Any:
    if not gate.single:
        raise FallowError(
            "optimizer.step(closure) needs the whole global batch in one shard; set the DataLoader's batch_size to "
            "global_batch, or use an optimizer without a closure",
            Exit.DATA,
        )

    if not gate.settle():
        return None
    # The closure's first backward opens the gate; until then it is closed, so `inner` is called regardless.
    result = inner(closure)
    gate.stepped = True
    return result
