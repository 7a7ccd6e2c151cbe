"""The base of ``graph_step`` and ``graph_fn``: lower and capture calls, and cache both."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

import torch

from ..ambient.modes import SWITCH, ordinary, without_gradients
from ..ambient.setting import inside_a_step, refuse_anomaly_mode, refuse_foreign_modes
from ..ambient.torch_modes import refuse_ambient_modes
from ..call.signature import Call, Signature
from ..concurrency.interrupts import held_back, undisturbed
from ..concurrency.turns import Turn, refuse_what_a_fork_cut_off
from ..errors import ClosedError, FunctionalCGError, LayoutError
from ..messages.source import warn
from ..messages.tracebacks import entry, shorten
from ..options import BackendChoice, Options
from ..stages.lower.compiled import announce, lower
from ..stages.passes.grouping import group_collectives
from ..stages.passes.rewrite import rewrite
from ..stages.plan import Backend
from ..stages.program import Program
from ..stages.run.capture import CUDABackend, backend_for
from ..stages.run.memory import scratch
from ..stages.run.poison import Poisoned
from ..stages.run.results import Stats
from ..stages.trace.footprint import inspection_of
from ..stages.trace.recipe import Recipe
from ..stages.trace.runs import trace
from ..stages.trial.reference import Reference
from ..stages.watch.host_watch import HostWatch
from ..state.boundary import mesh_of, reading_of
from ..state.handle import Handle, place, placeable
from ..state.lifecycle import staying
from ..transforms.taps import Taps
from .certify import Certified, certify
from .eager import run_eager
from .explain import explain, explain_html, warnings_of
from .guards import Constants, Guards
from .log import log, timed
from .lowered import MISS, Captured, Lowered
from .nonfinite import Nonfinite, find_nonfinite
from .profile.measure import profile_of
from .profile.result import Profile
from .ranks import groups_of
from .statistics import Statistics
from .verify import Shadow

__all__ = ["Transform"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
_MAX_STATIC_COMBINATIONS = 8


class Transform(Generic[P, R]):
    """A function with its options, its lowered plans and their captures."""

    _donates: bool
    _kind: str
    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], **given: Any) -> None:
        self._given, options = given, Options.of(self._kind, fn, given)
        self._options = options
        functools.update_wrapper(cast("Callable[..., Any]", self), fn)
        self._fn = fn
        self._signature = Signature(
            fn, options.static_argnames, donates=self._donates, steps=options.steps_per_call
        )
        self._name = self._signature.name
        self._constants = Constants(self._name, options.constants)
        self._backend: Backend | None = None if isinstance(options.backend, str) else options.backend
        self._shadow = Shadow(fn, self._name, self._constants, donates=self._donates)
        self._to_verify = options.verify_calls if "verify" in str(options.debug) else 0
        self._lowered: dict[tuple[Any, ...], list[Lowered]] = {}
        self._captured: dict[tuple[int, Any], Captured] = {}
        self._fast: Captured | None = (
            None  # the last one that replayed: the next call most likely fits it, too
        )
        self._closed = False
        self._refusal = ""
        # One thread at a time traces, captures or replays: threads share buffers and a memory pool.
        self._turn = Turn("a step")
        # For a method: its name in the instance's `__dict__`; the instance, and the step of its class.
        self._key, self._of = f"{self._name} of step {id(self):#x}", cast("tuple[Any, Any]", (None, None))
        self.stats, self.taps = Stats(), Taps()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call: ``state, metrics = step(state, *inputs, **static)``.

        A ``graph_step`` donates ``state``; a ``graph_fn`` borrows every state handle among its arguments.
        """
        try:
            if torch.is_inference_mode_enabled():
                with ordinary():  # results are ordinary tensors
                    without_gradients()
                    return self(*args, **kwargs)
            given: tuple[Any, ...] = args
            named: dict[str, Any] = kwargs
            if named:
                given, named = self._signature.by_position(given, named)
            captured = self._fast
            if captured is not None:
                done = captured.run(given, named, captured.turns)
                if done is MISS and (other := self._elsewhere(captured, given)) is not None:
                    self._fast = captured = other
                    done = captured.run(given, named, captured.turns)
                if done is not MISS:
                    return captured.finish(done)  # type: ignore[no-any-return]
            return self._slow(given, named)  # type: ignore[no-any-return]
        except Exception as error:
            shorten(error)
            raise

    @entry()
    def eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the Python function once on real values, under the same ownership rules as a captured call.

        ``print``, ``breakpoint`` and ``pdb`` show numbers. The result is bitwise that of a replay with
        ``lowering="aten"``, except for the few ops that torch computes differently in a trace, such as
        ``svdvals`` and the gradient of ``prod``: their last bits differ, and ``debug="verify"`` compares with
        what a trace computes.
        """
        return self._eager(args, kwargs)  # type: ignore[no-any-return]

    @property
    def statistics(self) -> Statistics:
        """What :func:`statistics` has tapped by module in the calls so far; waits for the device."""
        return Statistics.of(self.taps.tables())

    def profile(self, *args: P.args, **kwargs: P.kwargs) -> Profile:
        """Measure where the time and the memory of a call go, by module and by line of your code.

        Runs the calls one by one on copies of the values of ``args`` and ``kwargs``, and keeps the state. It takes the
        memory of a second state and of a step, and the time of some twenty calls. All ranks profile together.

        Returns:
          A :class:`functional_cg.step.profile.result.Profile`: it prints as a table, ``by_module()`` and ``by_line()``
          return rows in seconds and bytes, and :func:`functional_cg.report.profile` draws it.
        Raises:
          FunctionalCGError: As a call of the step does.

        Example:
          >>> import torch, functional_cg as fcg
          >>> apply, params, _ = fcg.from_module(torch.nn.Linear(4, 2))
          >>> @fcg.graph_step
          ... def train_step(state, x):
          ...     loss, grads = fcg.value_and_grad(lambda p: apply(p, {}, x)[0].square().mean())(state.params)
          ...     return state.apply_gradients(grads), {"loss": loss}
          >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
          >>> profile = train_step.profile(state, torch.ones(8, 4))
          >>> sorted(row.name for row in profile.by_module())
          ['(copies)', '(optimizer)', '<lambda>()', 'Linear', 'train_step()']
        """
        return self._looked_into(profile_of, args, kwargs)  # type: ignore[no-any-return]

    def find_nonfinite(self, *args: P.args, **kwargs: P.kwargs) -> Nonfinite:
        """Find the first call that makes a NaN or an infinity: where a loss of NaN comes from.

        Runs the calls one by one on copies of the values of ``args`` and ``kwargs``, as :meth:`profile` does; if they
        are finite, also the compiled step. Pass the state from before the bad call: a checkpoint, or a snapshot.

        Returns:
          A :class:`functional_cg.step.nonfinite.Nonfinite`, which prints the call with its module, your line, and what
          it reads. It is false if all results are finite.
        Raises:
          FunctionalCGError: As a call of the step does.

        Example:
          >>> import torch, functional_cg as fcg
          >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] - x.log()}, {}))
          >>> step.find_nonfinite({"w": torch.ones(2)}, torch.tensor([1.0, 0.0])).calls[0].made
          'f32[2]  -inf in 1 of 2, first at [1]; 0'
        """
        return self._looked_into(find_nonfinite, args, kwargs)  # type: ignore[no-any-return]

    @entry()
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace, check and plan a call without running it; ``.capture()`` on the result captures it.

        Returns:
          A :class:`Lowered`: ``.inspection``, ``.as_text()``, ``.cost_analysis()``, ``.memory_analysis()``.
        """
        call, lowered = self._turn.alone(functools.partial(self._lower_only, args, kwargs), self._name)
        capture = functools.partial(self._captured_for, call, lowered)
        return lowered.at(functools.partial(self._turn.alone, capture, self._name))  # type: ignore[no-any-return]

    def _lower_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Lowered]:
        self._refuse_closed()
        call = self._take_apart(args, kwargs)
        return call, self._noting(self._lowered_for, call)

    def explain(self) -> str:
        """Return as text what was traced, captured and refused.

        For each layout: what was checked, the plan, each leaf with its role and the bytes copied per call, the captures
        with their memory, and new values computed but dropped. Reads nothing from a device.
        """
        return explain(self._name, self.stats, self._plans(), self._refusal)

    def _plans(self) -> list[tuple[Lowered, list[Captured]]]:
        captured = list(self._captured.items())
        return [
            (lowered, [capture for (plan, _), capture in captured if plan == id(lowered)])
            for group in list(self._lowered.values())
            for lowered in group
        ]

    def close(self) -> None:
        """Free captures and their memory; states stay valid, later calls raise :class:`ClosedError`."""
        if self._turn.busy:
            self._turn.wait()
        with self._turn.lock:
            # In the middle of a call, for example in a signal handler, they are freed at its end.
            in_use, self._closed, self._fast = self._turn.busy and self._turn.over is None, True, None
            captures, self._captured = self._captured, {}
            self._lowered = {}  # not cleared: a step from `anew` may share these traces
            if not in_use:
                self._turn.end(functools.partial(_closed_error, self._name, self._kind))
                for captured in captures.values():
                    captured.close()

    def anew(self, *, backend: BackendChoice | None = None) -> Self:
        """Return a new step with the same function and options, which shares the traces but no captures."""
        new = type(self)(self._fn, **(self._given | ({} if backend is None else {"backend": backend})))
        new._lowered, new._constants = self._lowered, self._constants
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"`{self._name}`: a step cannot be pickled or copied, its captures are bound to memory of this process. "
            "To fix: save the state, `fcg.save(path, state)`, and decorate the function again."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {self.stats}{', closed' if self._closed else ''}>"

    def _repr_html_(self) -> str:
        return explain_html(self._name, self.stats, self._plans(), self._refusal)

    def _elsewhere(self, captured: Captured, args: tuple[Any, ...]) -> Captured | None:
        """Return the capture of the same plan for another first state, if it has run."""
        state = args[0] if args else None
        if type(state) is not Handle:
            return None
        place = (id(state._lease.arena), state._start, state._start + state._node.num_leaves)
        other = self._captured.get((id(captured.lowered), (place,)))
        return other if other is not captured and other is not None and other.ran else None

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_closed()
        if inside_a_step():
            return self._inside(args, kwargs)
        if self._options.backend == "eager" or os.environ.get("FCG_DISABLE_CAPTURE") == "1":
            if not self.stats.eager_calls and self._options.backend != "eager":
                log.warning("%s: FCG_DISABLE_CAPTURE=1, every call runs eagerly", self._name)
            return self._eager(args, kwargs)
        return self._turn.alone(functools.partial(self._noting, self._prepared, args, kwargs), self._name)()

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as part of another step."""
        if self._options.steps_per_call > 1:
            raise LayoutError.of(
                self._name,
                f"takes {self._options.steps_per_call} steps per call, and is called inside of a step.",
                why="What is called there becomes a part of the other step, and its inputs are not stacked.",
                fix=f"`fcg.scan({self._name}, state, batches)` of a step without `steps_per_call`.",
            )
        return self._fn(*args, **kwargs)

    def _noting(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run part of a call; keep a refusal's text for ``explain``: its traceback would keep tensors."""
        try:
            return act(*args)
        except FunctionalCGError as error:
            self._refusal = f"{type(error).__name__}: {error.within(self._name)}"
            raise

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Run a call; return a function that builds its result, to be called once the next call may begin."""
        self._refuse_closed()
        call = self._take_apart(args, kwargs)
        refuse_ambient_modes(self._name)
        lowered = self._lowered_for(call)
        if not self._to_verify:
            return self._replay(call, lowered)
        self._to_verify -= 1
        result = self._shadow.verify(lowered.seen(call), lowered, lambda: self._replay(call, lowered)())
        return lambda: result

    def _refuse_changes(self, lowered: Lowered, call: Call) -> None:
        def again() -> tuple[Program, HostWatch]:
            return undisturbed(functools.partial(self._traced, self._recipe(lowered.seen(call))))

        if lowered.guards.check(call, again):
            lowered.orders.clear()  # what was found of them holds for the old values
            lowered.inspection = replace(lowered.inspection, watched=lowered.guards.watch.names())

    def _replay(self, call: Call, lowered: Lowered) -> Callable[[], Any]:
        new = (key := (id(lowered), call.arenas)) not in self._captured
        args, kwargs = (call := lowered.seen(call)).arguments()
        try:
            captured = self._captured_for(call, lowered)
            done = captured.run(args, kwargs, captured.turns[1])
            if done is MISS:  # another thread has since donated a state, changed a value, or switches modes
                self._refuse_changes(lowered, self._take_apart(args, kwargs))
                assert lowered.runs(call, self._recipe), "its keys were in another order before"
                with SWITCH:
                    done = captured.run(args, kwargs, captured.turns[1])
            assert done is not MISS, "a call that was just taken apart fits its capture"
            captured.launched()
            lowered.counts = True
        except BaseException:
            # It never ran: keep nothing of it, since the corrected call may have another layout, unless it is wrong.
            if new and key in self._captured:
                self._captured.pop(key).close()
            if not lowered.counts and lowered.refuted is None:
                self._forget([lowered])
            raise
        if not (self._to_verify or call.statics or self._closed):
            self._fast, captured.ran = captured, True
        return functools.partial(captured.finish, done)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_closed()
        call = self._take_apart(args, kwargs)
        # Inputs take the strides they have in a replay, because the order of a sum depends on strides.
        alike = (one.seen(call) for one in self._lowered.get(call.static_key, ()) if one.fits(call))
        seen = next((one for one in alike if one.order == call.order), call)
        result = run_eager(self._fn, seen, self._name, self.taps, self._constants, donates=self._donates)
        self.stats.eager_calls += 1
        return result

    def _looked_into(
        self, look: Callable[[Call, Lowered], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def looked() -> Any:
            return self._noting(look, *self._lower_only(args, kwargs))

        with ordinary():
            return self._turn.alone(looked, self._name)

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        refuse_foreign_modes(self._name)
        args, kwargs = self._signature.by_position(args, kwargs)
        args, kwargs, statics = self._signature.split_static(args, kwargs)
        if self._donates:
            if not args:
                raise TypeError(f"`{self._name}`: the state must be the first argument")
            if not isinstance(args[0], Handle):
                self._signature.refuse_pair(args[0])
                args = (self._placed(args[0]), *args[1:])
        return self._signature.take_apart(args, kwargs, statics)

    def _placed(self, tree: Any) -> Handle:
        """Place a plain tree, reusing an arena of this step that has its layout and no handles left."""
        leaves, treedef, plan = placeable(tree, self._signature.parameter(0), self._name)
        for captured in list(self._captured.values()):
            if (taken := captured.taken_over(treedef, plan, leaves)) is not None:
                return taken
        return cast("Handle", place(tree))

    def _lowered_for(self, call: Call) -> Lowered:
        group = self._lowered.get(key := call.static_key, [])
        for lowered in group:
            if lowered.fits(call):
                self._refuse_changes(lowered, call)
                if lowered.runs(call, self._recipe):
                    return lowered
        if len(group) >= self._options.max_captures:
            self._forget([one for one in group if not one.counts and one.refuted is None])
        right = [one for one in group if one.refuted is None]
        if len(right) >= self._options.max_captures:
            raise right[0].refusal(call, self._kind, self._options.max_captures)
        if not group and len(self._lowered) >= _MAX_STATIC_COMBINATIONS:
            raise LayoutError.of(
                self._name,
                f"called with more than {_MAX_STATIC_COMBINATIONS} combinations of static arguments.",
                why="Each combination is a trace and a capture of its own.",
                fix="pass what changes often as an input.",
            )
        lowered = undisturbed(functools.partial(self._lower, call))
        self._lowered.setdefault(key, []).append(lowered)
        return lowered

    def _recipe(self, call: Call) -> Recipe:
        return Recipe.of(call, self._fn, self._constants.named(), donates=self._donates)

    def _traced(self, recipe: Recipe, checkpoint: Callable[[], None]) -> tuple[Program, HostWatch]:
        refuse_ambient_modes(self._name)
        refuse_anomaly_mode(self._name)
        refuse_what_a_fork_cut_off(self._name)
        with timed(self._name, "traced"):
            found = trace(recipe, checkpoint)
        self.stats.traces += 1
        return found

    def _lower(self, call: Call, checkpoint: Callable[[], None]) -> Lowered:
        recipe = self._recipe(call)
        announce(call.device, self._options)
        program, watch = self._traced(recipe, checkpoint)
        inspection = inspection_of(program, watch.names())
        reference = Reference(program.twin())  # before any rewrite
        with timed(self._name, f"lowered {len(program.instrs)} ATen calls"):
            specs = [spec for state in recipe.states for spec in state.specs]
            program.instrs = group_collectives(program.instrs, reading_of(specs), call.device)
            rewrite(program, call.places())
            guards = Guards(reference.program, watch, self._constants, groups_of(program, mesh_of(specs)))
            plan = lower(program, call.device, self._options, reference)
        found = (recipe.states, call.layout, program, plan, guards, inspection, reference)
        lowered = Lowered(self._name, *found)
        for text in warnings_of(lowered):
            warn(f"`{self._name}`: {text}")
        return lowered

    def _captured_for(self, call: Call, lowered: Lowered) -> Captured:
        key = (id(lowered), call.arenas)
        captured = self._captured.get(key)
        if captured is None:
            lowered.guards.groups.refuse_backend(self._name, call.device)
            lowered.meet()
            with held_back(), timed(self._name, "captured"), staying(s.arena for s in call.states):
                captured = self._captured[key] = self._capture(call, lowered)
            self.stats.captures += 1
            self._drop_spares()
            for arena in captured.arenas:
                arena.watchers.append(functools.partial(_reap, weakref.ref(self)))
        return captured

    def _capture(self, call: Call, lowered: Lowered) -> Captured:
        self._backend = self._backend or backend_for(call.device)
        arenas = [state.arena for state in call.states]
        for arena in arenas:
            arena.join()
        buffers, staging = lowered.buffers(call, arenas)
        spare = functools.partial(scratch, buffers, lowered.reference.unchecked.slots)
        if isinstance(self._backend, CUDABackend):
            lowered.plan = self._backend.choose_lanes(lowered.plan, buffers, spare)
        asked = self._options.certify
        if asked and lowered.plan.compiled and lowered.trial is None:
            lowered.trial = certify(lowered, buffers, arenas, self._backend, asked)
        replay = self._backend.capture(lowered.plan, buffers, spare)
        if lowered.trial is not None and asked != "first":
            alone = all(plan != id(lowered) for plan, _ in self._captured)  # one keeps a recorded comparison
            backend = self._backend if alone else None
            replay = Certified(replay, lowered, lowered.trial, buffers, arenas, backend, asked)
        replay = Poisoned(replay, staging.slots) if "poison" in str(self._options.debug) else replay
        return Captured(
            lowered,
            call,
            staging,
            buffers.constants,
            replay,
            donates=self._donates,
            turn=self._turn,
            stats=self.stats,
            taps=self.taps,
        )

    def _forget(self, gone: Collection[Lowered]) -> None:
        """Drop plans and their captures."""
        numbers = set(map(id, gone))
        for capture in [key for key in self._captured if key[0] in numbers]:
            self._captured.pop(capture).close()
        for key, group in list(self._lowered.items()):
            group[:] = [plan for plan in group if id(plan) not in numbers]
            if not group:
                del self._lowered[key]

    def _drop_spares(self) -> None:
        """Drop captures whose handles are all gone, but one for the next plain tree."""
        for key in [key for key, captured in self._captured.items() if captured.spare][:-1]:
            self._captured.pop(key).close()
            self._fast = None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise _closed_error(self._name, self._kind)


def _reap(this: weakref.ref[Any]) -> None:
    """Drop a step's captures whose handles are gone: now, or at the next capture if it is in a call."""
    step = this()
    if step is not None and not step._closed and not step._turn.busy:
        step._turn.alone(step._drop_spares)


def _closed_error(name: str, kind: str) -> ClosedError:
    return ClosedError.of(
        name,
        "called after `close()`.",
        why="Its captures and their memory are gone; states are still valid.",
        fix=f"make a new step, `{kind}(fn)`.",
    )
