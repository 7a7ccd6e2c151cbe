"""``graph_step`` and ``graph_fn``: transform a pure Python function into a captured step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from .manual import Documented
from .messages.tracebacks import entry
from .options import BackendChoice, Branches, Certify, CompileOnce, Debug, Lowering, with_options
from .step.captures import Transform

__all__ = ["GraphFn", "GraphStep", "graph_fn", "graph_step"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
T = TypeVar("T")


class GraphStep(Transform[P, R], metaclass=Documented):
    """A captured training step; made by :func:`graph_step`.

    Attributes:
      stats: Numbers of traces, captures, replays and eager calls.
      taps: ``step.taps[name]`` holds what :func:`tap` recorded in the calls so far.
      statistics: What :func:`statistics` recorded by module: a table, and what ``report.statistics`` draws.
    Methods:
      eager: Run the Python function once, for ``print`` and a debugger.
      explain: What was traced, captured and refused, as text.
      lower: Trace and check a call without running it; the result has ``memory_analysis()`` and ``cost_analysis()``.
      profile: Where the time and the memory of a call go.
      find_nonfinite: Where a NaN comes from.
      anew: A new step with the same function and options.
      close: Free the captures; so does leaving a ``with`` block.
    """

    _donates = True
    _kind = "graph_step"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self: GraphStep[Concatenate[T, Q], R], instance: T, owner: type | None = None
    ) -> GraphStep[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _of_instance(self, instance, owner)


class GraphFn(Transform[P, R], metaclass=Documented):
    """A captured read-only function; made by :func:`graph_fn`.

    Attributes:
      stats: Numbers of traces, captures, replays and eager calls.
      taps: ``fn.taps[name]`` holds what :func:`tap` recorded in the calls so far.
    Methods:
      eager, explain, lower, profile, find_nonfinite, anew, close: As of :class:`GraphStep`.
    """

    _donates = False
    _kind = "graph_fn"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self: GraphFn[Concatenate[T, Q], R], instance: T, owner: type | None = None
    ) -> GraphFn[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _of_instance(self, instance, owner)


def _of_instance(step: Transform[..., Any], instance: Any, owner: type | None) -> Any:
    """Return the step of a method for an instance, kept and freed with it."""
    # Not under the method's own name: a copy of the instance has its entries, and `super()` leads to another method
    # of that name.
    held = getattr(instance, "__dict__", None)
    if not isinstance(held, dict):
        raise TypeError(
            f"`{step._name}`: {instance!r} has no `__dict__` to keep its step in.\n"
            'To fix: add "__dict__" to `__slots__`; in place of a class method, decorate a `@staticmethod`.'
        )
    own = held.get(step._key)
    if own is None or own._of[0] is not instance or own._of[1] is not step:
        own = held[step._key] = type(step)(step._fn.__get__(instance, owner), **step._given)
        own._of = instance, step
    return own


class _MakesStep(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> GraphStep[P, R]: ...


class _MakesFn(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> GraphFn[P, R]: ...


@overload
def graph_step(
    fn: Callable[P, R],
    /,
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    steps_per_call: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug | None = None,
    verify_calls: int = 16,
    certify: Certify = "auto",
    activation_memory_budget: float | None = None,
    branches: Branches = "auto",
    branch_memory: int | None = None,
    compile_once: CompileOnce = "auto",
) -> GraphStep[P, R]: ...
@overload
def graph_step(
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    steps_per_call: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug | None = None,
    verify_calls: int = 16,
    certify: Certify = "auto",
    activation_memory_budget: float | None = None,
    branches: Branches = "auto",
    branch_memory: int | None = None,
    compile_once: CompileOnce = "auto",
) -> _MakesStep: ...
@entry("train_step = fcg.graph_step(fn)")
@with_options
def graph_step(fn: Any = None, /, **options: Any) -> Any:
    """Transform a pure ``fn(state, *inputs, **static) -> (state, metrics)`` into a captured step.

    The function is traced once on fake tensors, checked, lowered and captured; each call then replays the capture on
    preallocated buffers. The state passed in is donated; metrics are fresh tensors.

    Inputs are pytrees of tensors, of numpy arrays, which keep their dtype, and of numbers: a float becomes f32, also
    one of numpy (f64 where that is torch's default dtype). For a number in f64, pass a tensor or an array.

    Args:
      fn: The pure function, or a method. With or without parentheses.
      static_argnames: Arguments that are Python constants; each combination of values has its own capture.
      constants: Tensors, or trees of them, that ``fn`` closes over: copied at lowering, read-only.
      max_captures: Input layouts per combination of static arguments; one more raises ``LayoutError``. Each
        arena, such as a fork's, has its own capture, which this does not count.
      steps_per_call: Number K of steps per call, all in one graph: inputs [K, ...], metrics [K, ...]. For
        steps shorter than the launch of a graph. ``fn`` stays a function of one step. Stack a list of K
        batches with ``fcg.tree.map(lambda *leaves: torch.stack(leaves), *batches)``.
      lowering: ``"aten"`` starts in seconds; ``"inductor"`` compiles; ``"auto"`` is inductor on CUDA and aten
        on CPU; or a callable with the signature of a ``torch.compile`` backend. A replay of ``"aten"`` is
        bitwise equal to the eager run; a compiled one is equal up to rounding, which the first call checks
        (``certify``).
      backend: ``"auto"`` (where the state lives), ``"eager"`` (runs the Python each time), or a Backend object. The
        environment variable ``FCG_DISABLE_CAPTURE=1`` makes every step eager, for ``print`` and a debugger;
        ``FCG_NVTX=1`` names replays in the timeline of ``nsys``.
      debug: ``"verify"`` compares the first ``verify_calls`` calls with eager runs, bit for bit, to catch
        what the host watch does not see. If a compiler reorders sums, the traced calls are compared with the
        eager run bit for bit, and the compiled step with these calls up to rounding, as with ``certify``.
        ``"poison"`` overwrites dead memory between replays; ``"verify+poison"`` does both. A verified call
        costs about one eager run (half a dozen runs with a compiler), copies of states and inputs from before
        the call, and a comparison of all returned leaves, each of which waits for the device; later calls
        cost nothing extra. Poison costs a fill of inputs and metrics at every call.
        ``python -m tests.bench.debug`` measures both: on an H200, for a GPT of 4 layers with
        ``aten``, 0.97 ms per call without, 0.98 ms with poison, and 32 ms for a verified call.
      verify_calls: Number of calls to verify.
      certify: When to compare a compiled step with its traced calls, run one by one, before a call changes the
        state: ``"auto"`` at the first call, on its values and on others made from them, and at calls 2, 4, 8, 16
        and so on; an int N at every N-th call from the first; ``"first"`` at the first call alone; ``True`` as
        ``"auto"``, with an error where memory is too little; ``False`` never. It takes memory that is free; what
        it needs last waits on the host. ``explain()`` tells which calls were compared. Each takes a few runs of the
        traced calls.
      activation_memory_budget: What a compiled step on a GPU keeps of the forward for its backward: 0 the least
        that recomputing elementwise calls and normalizations allows, 1 what moves the fewest bytes, or the least
        traffic within a fraction of the way between; None for what pays in most models. To keep less than 0
        does, recompute products, too: :func:`functional_cg.remat`.
      branches: The most lanes, from 1 to 32, on which calls that do not need each other run side by side on a GPU, in
        one graph. The calls are those of ``"aten"``, with the bits of one lane; or what a compiled step launches, if
        its values are of at most 16 MiB: for lanes it is compiled otherwise, and differs from one line by rounding.
        ``"auto"`` is up to 8, where an estimate says that they gain a fifth, within ``branch_memory``, and where they
        are then measured to be faster, before the first call changes anything; otherwise 1. A step that is measured is
        compiled twice. With deterministic algorithms, a compiled step runs in one line.
        With collectives, a number has to be asked for: one lane is theirs, and the order of all calls is chosen so that
        others, weight gradients above all, run beside them. A step with ops of other libraries runs in one line.
        ``explain()`` says what runs side by side, or why nothing does.
      branch_memory: The most bytes that lanes take in addition to one line: those of temporaries, which lanes do not
        share, and for each lane with products a workspace of cuBLAS, 32 MiB on an H100. None is 5 % of the step's
        memory or 64 MiB, whichever is more, and no bound if ``branches`` is a number.
      compile_once: Whether a compiled step is cut where it repeats itself, and equal parts are compiled once: the
        layers of a transformer or of :func:`functional_cg.scan`, forward and backward. What is left to compile
        does not grow with their number, and ``explain()`` says which calls share a function. Calls in two parts are
        not fused, so it is cut before products, convolutions and attention, which no compiler fuses with what they
        read. Memory that a part has read is free only when the part ends, and there are more launches. ``"auto"`` cuts
        a step on a GPU where 1,000 calls or more need not be compiled, as for a transformer of 12 layers, and which
        has no lanes. Of GPT-2 of transformers on an H100, that takes the first call from 32 to 26 s with 12 layers,
        and from 150 to 62 s with 48; the step took as long (36.0 and 35.6 ms), and as much memory. The most that was
        lost is 1.8 %, in MLP-Mixer. A step with collectives, one over flat vectors (``optim.flatten``) and one that
        repeats little stay one function. Its calls run in one line.
    Raises:
      FunctionalCGError: At the call; the state passed in stays valid. See :mod:`functional_cg.errors`.

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
        return functools.partial(GraphStep, **options)
    return GraphStep(fn, **options)


@overload
def graph_fn(
    fn: Callable[P, R],
    /,
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug | None = None,
    verify_calls: int = 16,
    certify: Certify = "auto",
    branches: Branches = "auto",
    branch_memory: int | None = None,
    compile_once: CompileOnce = "auto",
) -> GraphFn[P, R]: ...
@overload
def graph_fn(
    *,
    static_argnames: Sequence[str] = (),
    constants: Any = (),
    max_captures: int = 1,
    lowering: Lowering = "auto",
    backend: BackendChoice = "auto",
    debug: Debug | None = None,
    verify_calls: int = 16,
    certify: Certify = "auto",
    branches: Branches = "auto",
    branch_memory: int | None = None,
    compile_once: CompileOnce = "auto",
) -> _MakesFn: ...
@entry("predict = fcg.graph_fn(fn)")
@with_options
def graph_fn(fn: Any = None, /, **options: Any) -> Any:
    """Transform a read-only ``fn(*args) -> outputs``: evaluation, sampling, acting.

    Every state handle among the arguments is borrowed, never donated; the rest is copied in. Options are as
    for :func:`graph_step`, except ``steps_per_call`` and ``activation_memory_budget``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> predict = fcg.graph_fn(lambda state, x: x @ state["w"])
      >>> predict(state, torch.ones(3, 2))
      tensor([2., 2., 2.])
    """
    if fn is None:
        return functools.partial(GraphFn, **options)
    return GraphFn(fn, **options)
