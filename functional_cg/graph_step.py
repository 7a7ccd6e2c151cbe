"""The transform: a pure Python function in, a captured step out."""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, cast, overload

import torch
from torch import Tensor

from . import tree as pytree
from .arena import Arena
from .errors import BakedValueError, ClosedError, LayoutError
from .inputs import Staging, layout_differences, layout_matcher
from .lowered import Captured, Lowered
from .signature import Call, Signature
from .stages.capture import Backend, backend_for
from .stages.inspect import certify, refuse_new_state
from .stages.lower import Buffers, ExecutionPlan, lower_aten
from .stages.program import Program
from .stages.replay import MISS, Bound, Stats, output_builder, replayer
from .stages.trace import BoundState, Recipe, canonical, is_fake, trace
from .stages.watch import refuse_ambient_autocast, watch
from .state import Handle, Lease, fill, place, placeable

__all__ = ["GraphFn", "GraphStep", "graph_fn", "graph_step"]

S = TypeVar("S")
M = TypeVar("M")
P = ParamSpec("P")

_log = logging.getLogger("functional_cg")
_MAX_STATIC_COMBINATIONS = 8

Lowering = Literal["auto", "aten", "inductor"] | Callable[..., Any]
BackendChoice = Literal["auto", "eager"] | Backend
Debug = Literal["verify", "poison", "verify+poison"] | None


class _Transform:
    """What ``graph_step`` and ``graph_fn`` have in common: lowering, capture and the cache of both."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        donates: bool,
        static_argnames: Sequence[str] = (),
        constants: Any = (),
        max_captures: int = 1,
        lowering: Lowering = "auto",
        backend: BackendChoice = "auto",
        debug: Debug = None,
        verify_calls: int = 16,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"expected a function, got {type(fn).__name__}")
        if not isinstance(max_captures, int) or max_captures < 1:
            raise ValueError(f"max_captures: expected an int of at least 1, got {max_captures!r}")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._options: dict[str, Any] = {
            "static_argnames": static_argnames, "constants": constants, "max_captures": max_captures,
            "lowering": lowering, "backend": backend, "debug": debug, "verify_calls": verify_calls,
        }  # fmt: skip
        self._signature = Signature(fn, static_argnames, donates=donates)
        self._constants = _Constants(self._signature.name, constants)
        self._max_captures = max_captures
        self._lowering = lowering
        self._backend_choice = backend
        self._backend: Backend | None = None if backend in ("auto", "eager") else cast("Backend", backend)
        self._verify = _Verifier(verify_calls) if debug and "verify" in debug else None
        self._lowered: dict[tuple[Any, ...], list[Lowered]] = {}
        self._captured: dict[tuple[int, Any], Captured] = {}
        self._fast: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._closed = False
        self._attribute = ""
        self.stats = Stats()

    # -- public -----------------------------------------------------------------------------------------------

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace, check and plan a call without device work; ``.capture()`` goes on from there.

        Returns:
          A :class:`Lowered`: ``.inspection``, ``.as_text()``, ``.memory_analysis()``, ``.capture()``.
        """
        self._refuse_closed()
        call = self._take_apart(args, kwargs)
        lowered = self._lowered_for(call)
        return lowered.at(functools.partial(self._captured_for, call, lowered))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Python function once on real values, under the same ownership rules as a captured call.

        ``print``, ``breakpoint`` and ``pdb`` show numbers. The result is bitwise that of a replay.
        """
        self._refuse_closed()
        self.stats.eager_calls += 1
        return self._eager(self._take_apart(args, kwargs))

    def explain(self) -> str:
        """What was traced, captured and replayed, as text."""
        lines = [
            f"{self._signature.name}: {self.stats.traces} traces, {self.stats.captures} captures, "
            f"{self.stats.replays} replays, {self.stats.eager_calls} eager calls"
        ]
        for group in self._lowered.values():
            for lowered in group:
                lines.append(str(lowered))
        return "\n".join(lines)

    def close(self) -> None:
        """Free captures and their memory; states stay valid. Calls raise :class:`ClosedError` from then on."""
        self._fast = None
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()
        self._lowered.clear()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"`{self._signature.name}`: a step cannot be pickled or copied, its capture is bound to memory of this "
            "process; pickle the state (`fcg.snapshot(state)`) and decorate the function again."
        )

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # Like functools.cached_property: one step per instance, kept and freed with it.
        step = type(self)(self._fn.__get__(instance, owner), **self._options)
        instance.__dict__[self._attribute or self._signature.name] = step
        return step

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._signature.name}: {self.stats}>"

    # -- calls ------------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fast = self._fast
        if fast is not None:
            result = fast(args, kwargs)
            if result is not MISS:
                return result
        return self._slow(args, kwargs)

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_closed()
        if any(is_fake(leaf) for leaf in _shallow_leaves(args, kwargs)):
            return self._fn(*args, **kwargs)  # called inside of another step's trace: becomes a part of it
        if self._backend_choice == "eager" or os.environ.get("FCG_DISABLE_CAPTURE") == "1":
            return self._disabled(args, kwargs)
        call = self._take_apart(args, kwargs)
        refuse_ambient_autocast(self._signature.name)
        lowered = self._lowered_for(call)
        lowered.watch.check(self._signature.name)
        self._constants.check()
        if self._verify is not None and self._verify.wanted():
            return self._verify.run(self, call, lowered)
        return self._replay(call, lowered)

    def _replay(self, call: Call, lowered: Lowered) -> Any:
        captured = self._captured_for(call, lowered)
        if self._verify is None and not call.statics:
            self._fast = captured.call
        args, kwargs = call.assemble([state.handle for state in call.states], call.live)
        for name in call.statics:
            del kwargs[name]
        result = captured.call(args, kwargs)
        assert result is not MISS, "a call that was just taken apart fits its capture"
        return result

    def _disabled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.stats.eager_calls and self._backend_choice != "eager":
            _log.warning("%s: FCG_DISABLE_CAPTURE=1, every call runs eagerly", self._signature.name)
        return self.eager(*args, **kwargs)

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        args, kwargs, statics = self._signature.split_static(args, kwargs)
        if self._signature.donates:
            if not args:
                raise TypeError(f"`{self._signature.name}`: the state must be the first positional argument")
            if not isinstance(args[0], Handle):
                args = (self._placed(args[0]), *args[1:])
        return self._signature.take_apart(args, kwargs, statics)

    def _placed(self, tree: Any) -> Handle:
        """Place a plain tree, in an arena of this step whose last handle is gone if there is one of its layout."""
        leaves, treedef, plan = placeable(tree, self._signature.parameter(0), self._signature.name)
        for captured in self._captured.values():
            if captured.spare and captured.treedef == treedef and captured.arena.plan == plan:
                lease = captured.lease_again()
                fill(lease, leaves)
                return Handle(lease, 0)
        return cast("Handle", place(tree))

    # -- stages -----------------------------------------------------------------------------------------------

    def _lowered_for(self, call: Call) -> Lowered:
        key = tuple(sorted(call.statics.items()))
        group = self._lowered.get(key, [])
        for lowered in group:
            if lowered.fits(call):
                return lowered
        if len(group) >= self._max_captures:
            self._refuse_layout(group[0], call)
        if key not in self._lowered and len(self._lowered) >= _MAX_STATIC_COMBINATIONS:
            raise LayoutError.of(
                self._signature.name,
                f"was called with more than {_MAX_STATIC_COMBINATIONS} combinations of static arguments.",
                why="Each combination is a trace and a capture of its own.",
                fix="pass what changes often as an input.",
            )
        lowered = self._lower(call)
        self._lowered.setdefault(key, []).append(lowered)
        return lowered

    def _lower(self, call: Call) -> Lowered:
        name = self._signature.name
        refuse_ambient_autocast(name)
        states = tuple(
            BoundState(s.name, s.handle._node, tuple(slot.spec for slot in s.arena.plan.slots[s.start : s.stop]))
            for s in call.states
        )
        recipe = Recipe(
            self._fn, name, states, call.layout.specs, call.layout.live_names, call.assemble,
            self._constants.named(), self._signature.donates,
        )  # fmt: skip
        with _timed(f"{name}: traced"):
            program = trace(recipe)
        self.stats.traces += 1
        host_watch = watch(self._fn)
        with _timed(f"{name}: lowered {len(program.instrs)} calls"):
            plan = self._plan(program, call.device)
        return Lowered(name, states, call.layout, program, plan, host_watch, certify(program, host_watch.names()))

    def _plan(self, program: Program, device: torch.device) -> ExecutionPlan:
        choice = self._lowering
        if choice == "auto":
            choice = "inductor" if device.type == "cuda" else "aten"
        if choice == "aten":
            return lower_aten(program)
        from .stages.inductor import lower_compiled  # the compiler takes seconds to import

        return lower_compiled(program, device, None if choice == "inductor" else choice)

    def _captured_for(self, call: Call, lowered: Lowered) -> Captured:
        key = (id(lowered), call.arenas)
        captured = self._captured.get(key)
        if captured is None:
            with _timed(f"{self._signature.name}: captured"):
                captured = self._capture(call, lowered)
            self._captured[key] = captured
            self.stats.captures += 1
            self._watch_leases(captured, call)
        return captured

    def _capture(self, call: Call, lowered: Lowered) -> Captured:
        program = lowered.program
        if self._backend is None:
            self._backend = backend_for(call.device)
        staging = Staging(call.layout.specs, call.device)
        for state in call.states:
            state.arena.join()
        staging.join()
        staging.copy_in(call.live)
        slots = [slot for state in call.states for slot in state.arena.slots[state.start : state.stop]]
        constants = [constant.value.to(constant.var.spec.device) for constant in program.constants]
        constants = [c.clone() if c is k.value else c for c, k in zip(constants, program.constants, strict=True)]
        replay = self._backend.capture(
            lowered.plan,
            Buffers(slots, staging.slots, constants),
            lambda: Buffers(_scratch(slots), staging.slots, constants),
        )
        bound = [Bound(s.position, s.arena, s.start, s.stop) for s in call.states]
        assert program.output_def is not None
        fast = replayer(
            name=self._signature.name,
            bound=bound,
            donates=self._signature.donates,
            match=layout_matcher(call.layout, call.device),
            unchanged=self._unchanged(lowered),
            staging=staging,
            replay=replay,
            build=output_builder(program.output_def, program.outputs),
            stats=self.stats,
        )
        return Captured(fast, replay, tuple(b.arena for b in bound), call)

    def _unchanged(self, lowered: Lowered) -> Callable[[], bool]:
        values, constants = lowered.watch.unchanged, self._constants.unchanged
        return (lambda: values() and constants()) if self._constants else values

    def _watch_leases(self, captured: Captured, call: Call) -> None:
        """Keep at most one arena whose handles are all gone; it waits for the next plain tree."""
        this = weakref.ref(self)
        for state in call.states:
            captured.leases.append(weakref.ref(state.lease, lambda _: _reap(this)))

    # -- eager ------------------------------------------------------------------------------------------------

    def _eager(self, call: Call) -> Any:
        with canonical():
            trees = [
                pytree.unflatten(
                    s.handle._node, [slot.clone() for slot in _joined(s.arena).slots[s.start : s.stop]]
                )
                for s in call.states
            ]
            live = [_private(t, spec.stride, call.device) for t, spec in zip(call.live, call.layout.specs, strict=True)]
            args, kwargs = call.assemble(trees, live)
            result = self._fn(*args, **kwargs)
            if not self._signature.donates:
                return pytree.map(_own, result)
            return self._commit(call, result)

    def _commit(self, call: Call, result: Any) -> Any:
        name, state = self._signature.name, call.states[0]
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayoutError.of(
                name,
                "does not return a pair of new state and metrics.",
                rows=[f"result  expected (state, metrics)   got {type(result).__name__}"],
                fix="`return state, {}` if there are no metrics; for a read-only function use `graph_fn`.",
            )
        new, treedef = pytree.flatten(result[0])
        specs = [slot.spec for slot in state.arena.plan.slots]
        refuse_new_state(name, state.handle._node, specs, treedef, new)
        metrics = pytree.map(_own, result[1])
        with state.arena.lock:
            state.handle._check()
            object.__setattr__(state.handle, "_donor", name)
            state.lease.write(range(len(new)), new)
        return Handle(state.lease, state.lease.cell[0]), metrics

    # -- refusals ---------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError.of(
                self._signature.name,
                "was called after `close()`.",
                why="Its captures and their memory are gone; states are still valid.",
                fix="make a new step, `graph_step(fn)`.",
            )

    def _refuse_layout(self, known: Lowered, call: Call) -> None:
        rows = known.state_differences(call) + layout_differences(known.layout, call.layout)
        raise LayoutError.of(
            self._signature.name,
            f"called with another layout than it was captured for (max_captures={self._max_captures}); "
            "the state is unchanged.",
            rows=rows,
            why="A captured graph has fixed shapes, dtypes and structure.",
            fix="pad the last batch or drop it; to pay for one more graph, use "
            f"`graph_step(max_captures={self._max_captures + 1})`.",
        )


def _reap(this: weakref.ref[_Transform]) -> None:
    step = this()
    if step is None:
        return
    spare = [(key, captured) for key, captured in list(step._captured.items()) if captured.spare]
    for key, captured in spare[:-1]:
        step._captured.pop(key, None)
        if step._fast is captured.call:
            step._fast = None
        captured.close()


class _Constants:
    """Declared constants: copied at lowering; the originals must not be written later."""

    def __init__(self, function: str, tree: Any) -> None:
        paths_and_leaves, _ = pytree.flatten_with_path(tree)
        self._function = function
        self._items = [
            (pytree.path_string(path, "constants"), leaf) for path, leaf in paths_and_leaves if isinstance(leaf, Tensor)
        ]
        self._versions = [_version(leaf) for _, leaf in self._items]

    def __bool__(self) -> bool:
        return bool(self._items)

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        self._versions = [_version(leaf) for _, leaf in self._items]
        return tuple(self._items)

    def unchanged(self) -> bool:
        return all(_version(leaf) == v for (_, leaf), v in zip(self._items, self._versions, strict=True))

    def check(self) -> None:
        """Raise if an original was written since it was copied."""
        rows = [
            f"{name}  written {_version(leaf) - v} time(s) since"
            for (name, leaf), v in zip(self._items, self._versions, strict=True)
            if _version(leaf) != v
        ]
        if rows:
            raise BakedValueError.of(
                self._function,
                "a declared constant was written after the step copied it.",
                rows=rows,
                why="The step replays with the value that it had then.",
                fix="pass it as an input, or keep it in the state.",
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Verifier:
    """``debug="verify"``: the first calls run twice, replayed and eagerly, and must agree bitwise."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def wanted(self) -> bool:
        return self._left > 0

    def run(self, step: _Transform, call: Call, lowered: Lowered) -> Any:
        self._left -= 1
        before = [slot.clone() for state in call.states for slot in _joined(state.arena).slots]
        live = [tensor.clone() for tensor in call.live]
        result = step._replay(call, lowered)
        expected = step._shadow(call, before, live)  # type: ignore[attr-defined]
        step._compare(result, expected)  # type: ignore[attr-defined]
        return result


def _joined(arena: Arena) -> Arena:
    arena.join()
    return arena


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _private(tensor: Tensor, stride: tuple[int, ...], device: torch.device) -> Tensor:
    """A copy on the step's device with the strides of its slot."""
    out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
    return out.copy_(tensor)


def _scratch(slots: Sequence[Tensor]) -> list[Tensor]:
    """Buffers for warm-up: floating leaves share one (their values do not matter), the others are copied."""
    shared: dict[torch.dtype, Tensor] = {}
    for slot in slots:
        known = shared.get(slot.dtype)
        if slot.is_floating_point() and (known is None or known.numel() < slot.numel()):
            shared[slot.dtype] = torch.zeros(slot.numel(), dtype=slot.dtype, device=slot.device)
    return [
        torch.as_strided(shared[slot.dtype], slot.shape, slot.stride()) if slot.dtype in shared else slot.clone()
        for slot in slots
    ]


def _shallow_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Handle):
            yield from pytree.leaves(value)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    _log.info("%s in %.2f s", what, time.perf_counter() - start)


class GraphStep(_Transform, Generic[S, P, M]):
    """A captured training step; made by :func:`graph_step`.

    Attributes:
      stats: Numbers of traces, captures, replays and eager calls.
    """

    def __init__(self, fn: Callable[Concatenate[S, P], tuple[S, M]], **options: Any) -> None:
        super().__init__(fn, donates=True, **options)

    def __call__(self, state: S, /, *args: P.args, **kwargs: P.kwargs) -> tuple[S, M]:
        """Run one step: ``state, metrics = step(state, *inputs, **static)``. Donates ``state``."""
        return self._call((state, *args), kwargs)  # type: ignore[no-any-return]


class GraphFn(_Transform, Generic[P, M]):
    """A captured read-only function; made by :func:`graph_fn`."""

    def __init__(self, fn: Callable[P, M], **options: Any) -> None:
        super().__init__(fn, donates=False, **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> M:
        """Run the function; every state handle among the arguments is borrowed."""
        return self._call(args, kwargs)  # type: ignore[no-any-return]


@overload
def graph_step(fn: Callable[Concatenate[S, P], tuple[S, M]], /) -> GraphStep[S, P, M]: ...
@overload
def graph_step(
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug = None,
    verify_calls: int = 16,
) -> Callable[[Callable[Concatenate[S, P], tuple[S, M]]], GraphStep[S, P, M]]: ...
def graph_step(fn: Any = None, /, **options: Any) -> Any:
    """Transform a pure ``fn(state, *inputs, **static) -> (state, metrics)`` into a captured step.

    The function is traced once on fake tensors, checked, lowered and captured; each call then replays the capture on
    preallocated buffers. The state passed in is donated, metrics are fresh tensors.

    Args:
      fn: The pure function, or a method. With or without parentheses.
      static_argnames: Arguments that are Python constants; each combination of values is a capture of its own.
      constants: Tensors, or trees of them, that ``fn`` closes over: copied at lowering, read-only.
      max_captures: Input layouts per combination of static arguments; one more is a ``LayoutError``.
      lowering: ``"aten"`` starts in seconds; ``"inductor"`` compiles; ``"auto"`` is inductor on CUDA and aten on
        CPU; or a callable with the signature of a ``torch.compile`` backend.
      backend: ``"auto"`` (where the state lives), ``"eager"`` (runs the Python each time), or a Backend object.
      debug: ``"verify"`` compares the first ``verify_calls`` calls with eager runs; ``"poison"`` overwrites dead
        memory between replays.
      verify_calls: Number of calls to verify.
    Raises:
      FunctionalCGError: At the call, before anything is launched; see :mod:`functional_cg.errors`.

    Example:
      >>> import torch, functional_cg as fcg
      >>> @fcg.graph_step
      ... def train_step(state, batch):
      ...     loss, grads = fcg.value_and_grad(lambda p: ((batch @ p["w"]) ** 2).mean())(state.params)
      ...     return state.apply_gradients(grads), {"loss": loss}
      >>> state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1))
      >>> state, metrics = train_step(state, torch.ones(4, 2))
      >>> metrics["loss"]
      tensor(4.)
    """
    if fn is None:
        return lambda function: GraphStep(function, **options)
    return GraphStep(fn, **options)


@overload
def graph_fn(fn: Callable[P, M], /) -> GraphFn[P, M]: ...
@overload
def graph_fn(
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug = None,
    verify_calls: int = 16,
) -> Callable[[Callable[P, M]], GraphFn[P, M]]: ...
def graph_fn(fn: Any = None, /, **options: Any) -> Any:
    """Transform a read-only ``fn(*args) -> outputs``: evaluation, sampling, acting.

    Every state handle among the arguments is borrowed, never donated; the rest is copied in. Options as for
    :func:`graph_step`.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> predict = fcg.graph_fn(lambda state, x: x @ state["w"])
      >>> predict(state, torch.ones(3, 2))
      tensor([2., 2., 2.])
    """
    if fn is None:
        return lambda function: GraphFn(function, **options)
    return GraphFn(fn, **options)
