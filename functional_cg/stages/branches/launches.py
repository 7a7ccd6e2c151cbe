"""Record what a compiled function launches, and on which memory, by a run on fake tensors.

The function is Python that torch's compiler wrote: it allocates, takes views, calls ops, and launches kernels. Torch's
dispatcher sees all but the kernels, for which stand-ins note the arguments. So each launch becomes a call on variables,
like those of a traced program. What the function calls besides is refused: then the step runs in one line.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors.words import words_of
from ...shards.collectives import WAIT
from ...tensors.aten import written_arguments
from ...tensors.fake_mode import FakeMode
from ..evaluate import AS_STRIDED
from ..program import Instr, Var, vars_in
from ..variables import Variables
from .costs import weigh
from .source import Code, Writer
from .units import units_of

__all__ = ["Launches", "UnknownLaunch"]

_EMPTY = torch.ops.aten.empty_strided.default
# On a CPU, a kernel is a function in C, whose types of arguments only the source of the module says.
_OF_CPP = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\]),", re.MULTILINE)


class UnknownLaunch(Exception):
    """A compiled function does what is not known to be a launch."""


class Kernel:
    """A kernel as an op of a program.

    Args:
      name: Its name in the module.
      launch: What launches it.
      only_reads: By position of an argument, whether it only reads it; it may write all others.
    """

    tags = (torch.Tag.pointwise,)  # as far as its cost goes: it takes what it moves

    def __init__(self, name: str, launch: Callable[..., Any], only_reads: Sequence[bool]) -> None:
        self._schema = torch._C.parse_schema(f"fcg::{name}(Tensor[] given) -> ()")
        self._name, self._op, self._only_reads = name, launch, only_reads

    def __str__(self) -> str:
        return self._name

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that it may write."""
        given = [one for one, read in itertools.zip_longest(args, self._only_reads) if not read]
        return [one for one in (*given, *kwargs.values()) if isinstance(one, Tensor)]


class Launches(TorchDispatchMode):
    """The launches of a compiled function, recorded as calls of a program.

    Args:
      function: Name of the user's function.
      source: The module that the compiler wrote.
      names: Its globals.
      arguments: Tensors like the function's arguments, as it will get them, each in memory of its own.
      count: How many of its results leave the step.
    Attributes:
      units: The launches, weighed.
      code: What there is beside them.
    Raises:
      UnknownLaunch: If the function calls something that is not known, or asks for values.
    """

    def __init__(
        self, function: str, source: str, names: Mapping[str, Any], arguments: Sequence[Tensor], count: int
    ) -> None:
        super().__init__()
        self._calls: list[Instr] = []
        self._made_for: dict[Instr, list[Instr]] = {}
        # Allocations, with views, until something touches the memory.
        self._waiting: dict[int, list[Instr]] = {}
        self._constants: dict[Var, Tensor] = {}
        self._mode, self._writer = FakeMode(), Writer()
        self._variables = Variables(self._mode)
        fakes = list(map(self._there, arguments))
        self._arguments: list[Var] = self._vars(fakes)
        call = getattr(names["call"], "__func__", names["call"])
        objects = [None] * (call.__code__.co_argcount - 1)  # of a method
        try:
            scope = self._stand_ins({*call.__code__.co_names}, source, names, fakes, arguments)
            with self._mode, self:
                results = self._vars(FunctionType(call.__code__, scope)(*objects, list(fakes)))
            for calls in self._waiting.values():  # results that nothing writes, since they have no elements
                self._calls += calls
            there = {*self._arguments, *self._constants}
            known = {var.storage for var in there}
            first, self.units = units_of(self._calls, {}, known, self._made_for)
            for unit in (first, *self.units):
                for instr in unit.calls:
                    unit.lines.append(self._writer.line(instr, there))
                    unit.defined += [(var.storage, repr(var)) for var in instr.outputs() if var not in there]
            weigh(self.units, fits=True)
            kept = frozenset(var.storage for var in vars_in(results))
            kernels = [name for op, name in self._writer.ops.items() if isinstance(op, Kernel)]
            returned = self._writer.literal(tuple(results[:count]))
            self.code = Code(function, first, returned, kept, known, kernels)
        except UnknownLaunch:
            raise
        except Exception as error:  # of any op, or of a kernel that does not say what it writes
            raise UnknownLaunch(f"{type(error).__name__}: {words_of(error)}") from error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for the device of a fake tensor
            return func(*args, **kwargs)
        written = written_arguments(func, args, kwargs)
        before = [(one.shape, one.stride()) for one in written]
        out = args[0] if func is WAIT else func(*args, **kwargs)  # on fake tensors, it returns another one
        if [(one.shape, one.stride()) for one in written] != before:
            raise UnknownLaunch(f"{func}, which gives a tensor other memory")
        self._record(func, args, kwargs, out, written)
        return out

    def scope(self, arguments: Sequence[Tensor], clears: Sequence[Callable[[], Any]]) -> dict[str, Any]:
        """Return what the source refers to, for arguments and what to call after all else."""
        tensors = {**self._constants, **dict(zip(self._arguments, arguments, strict=True))}
        named = {repr(var): tensor for var, tensor in tensors.items()}
        return {**self._writer.names, **named, "clears": clears}

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like one that is there before the run."""
        with self._mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def _vars(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._variables.get(value) or self._variables.new(value)
        return type(value)(map(self._vars, value)) if isinstance(value, (list, tuple)) else value

    def _record(
        self, op: Any, args: Any, kwargs: dict[str, Any], out: Any, written: Sequence[Tensor]
    ) -> None:
        """Add a call; what it allocates and views of that go to the first call that touches the memory."""
        named = {name: self._vars(value) for name, value in kwargs.items()}
        instr = Instr(op, self._vars(args), named, self._vars(out), tuple(self._vars(written)), None)
        touched = {var.storage: None for var in instr.inputs()}
        waiting = [one for one in touched if one in self._waiting]
        if op is _EMPTY:
            self._waiting[instr.out.storage] = [instr]
        elif waiting and instr.only_views and len(touched) == 1:
            self._waiting[waiting[0]].append(instr)
        else:
            self._made_for[instr] = [one for memory in waiting for one in self._waiting.pop(memory)]
            self._calls.append(instr)

    def _launch(self, kernel: Kernel, *args: Any, **kwargs: Any) -> None:
        self._record(kernel, args, kwargs, None, kernel.written(args, kwargs))

    def _stand_ins(
        self,
        called: set[str],
        source: str,
        names: Mapping[str, Any],
        fakes: Sequence[Tensor],
        arguments: Sequence[Tensor],
    ) -> dict[str, Any]:
        """Return the globals for the run: of what the function may call, only what is known to be harmless as it is."""
        kernels, real = dict(_kernels(source, names)), dict(zip(map(id, fakes), arguments, strict=True))
        device = arguments[0].device if arguments else torch.device("cpu")
        known: dict[str, Any] = {
            "torch": _Torch(),
            "reinterpret_tensor": _reinterpreted,
            "get_raw_stream": int,
            "empty_strided_cpu": partial(_allocated, torch.device("cpu")),
            "empty_strided_cuda": partial(_allocated, device),
            "copy_if_misaligned": partial(_aligned, names, real),
        }
        scope: dict[str, Any] = {"__builtins__": __builtins__}
        for name in called & names.keys():
            value = names[name]
            if isinstance(value, Tensor):
                scope[name] = fake = self._there(value)
                self._constants[self._vars(fake)] = value
            elif name in kernels:
                launch = partial(self._launch, kernels[name])
                scope[name] = launch if callable(value) else SimpleNamespace(run=launch)
            elif name in known:
                scope[name] = known[name]
            elif name.startswith("assert_"):
                scope[name] = _nothing  # of strides and alignments: they passed when the function itself ran
            elif callable(value) and not isinstance(value, ModuleType):
                scope[name] = partial(_refused, name)
            else:
                scope[name] = value
        return scope


class _Torch:
    """The module, whose calls to CUDA only set the device; it is set for all of a capture."""

    cuda = SimpleNamespace(_DeviceGuard=contextlib.nullcontext, set_device=lambda _: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _kernels(source: str, names: Mapping[str, Any]) -> Any:
    """Yield the kernels of a module by name: those of Triton, and those in C++."""
    for name, types in _OF_CPP.findall(source):
        only_reads = [kind.startswith("const ") for kind in ast.literal_eval(types)]
        yield name, Kernel(name, names[name], only_reads)
    for name, value in names.items():
        if (mutated := getattr(value, "mutated_arg_names", None)) is not None:
            # The names of arguments say something where the compiler wrote the kernel.
            own = value.heuristic_type.name != "USER_AUTOTUNE"
            read = [own and one.startswith("in_ptr") and one not in mutated for one in value.fn.arg_names]
            yield name, Kernel(name, partial(_on_stream, value.run, names["get_raw_stream"]), read)


def _on_stream(run: Callable[..., Any], stream_of: Callable[[int], int], *args: Any, stream: int) -> None:
    """Launch a kernel of Triton on the stream of the lane, given the number of its device."""
    run(*args, stream=stream_of(stream))


def _reinterpreted(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    view: Tensor = AS_STRIDED(tensor, size, stride, int(tensor.storage_offset()) + offset)
    return view


def _allocated(
    device: torch.device, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    made: Tensor = _EMPTY(size, stride, dtype=dtype, device=device)
    return made


def _aligned(names: Mapping[str, Any], real: Mapping[int, Tensor], tensor: Tensor) -> Tensor:
    """Return an argument, if the function takes it as it is."""
    with _disable_current_modes():
        argument = real[id(tensor)]
        if names["copy_if_misaligned"](argument) is not argument:
            raise UnknownLaunch("copy_if_misaligned")
    return tensor


def _nothing(*_: object) -> None:
    pass


def _refused(name: str, *_: object, **__: object) -> None:
    raise UnknownLaunch(name)
