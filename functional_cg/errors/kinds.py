"""The classes of errors: each docstring is the page of the manual for one mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ..manual import Documented

_ROWS_SHOWN = 5


class FunctionalCGError(Exception, metaclass=Documented):
    """Base class of every error that functional_cg raises about a broken guarantee.

    Attributes:
      function: Name of the user's function; empty for errors outside of a step.
    """

    function: str = ""

    @classmethod
    def of(
        cls,
        function: str,
        what: str,
        *,
        rows: Sequence[str] = (),
        why: str = "",
        fix: str = "",
    ) -> Self:
        """Compose the message from the template.

        Args:
          function: Name of the user's function; empty for errors outside of a step.
          what: What happened: one sentence in the present tense.
          rows: One line per difference; 5 are shown, the rest are counted.
          why: Why replay would go wrong: one sentence.
          fix: One imperative, with the user's names.
        """
        lines = [f"`{function}`: {what}" if function else what]
        lines += [f"  {row}" for row in rows[:_ROWS_SHOWN]]
        if len(rows) > _ROWS_SHOWN:
            lines.append(f"  … and {len(rows) - _ROWS_SHOWN} more")
        if why:
            lines.append(why)
        if fix:
            lines.append(f"To fix: {fix}")
        lines.append(f"Docs: help(functional_cg.{cls.__name__})")
        error = cls("\n".join(lines))
        error.function = function
        return error

    def within(self, function: str, where: str = "") -> Self:
        """Return this error; if it names no function yet, such as one from a tree, name the step it is from.

        Args:
          function: Name of the user's function.
          where: The line in it, as in ``", at train.py:41"``.
        """
        if not self.function:
            self.function = function
            what, newline, rest = str(self).partition("\n")
            self.args = (f"`{function}`: {what.removesuffix('.')}{where}.{newline}{rest}",)
        return self


class LayoutError(FunctionalCGError, ValueError):
    """Structure, shape, dtype or device is not what the step was lowered for.

    A graph has fixed shapes, so nothing is broadcast or cast. Causes:

    - The last batch is smaller. Drop it (``DataLoader(..., drop_last=True)``), pad it and pass a mask, or pay for a
      second graph with ``max_captures=2``.
    - A numpy array is float64. Use ``x.astype("float32")``; Python floats are f32 already.
    - A batch has other keys, or a list instead of a dict. Give each batch the same structure.
    - A string or another object differs. Name its argument in ``static_argnames``: each value gets a graph.
    - An input requires grad. Nothing flows back through a replay: take the gradient in the step, or ``x.detach()``.
    - The step returns a state unlike the old one::

        return {"w": state["w"].double()}, {}               # refused: f64 where f32 was
        return state, {"w": state["w"].double()}            # results of another kind are metrics
    """


class DonatedStateError(FunctionalCGError, RuntimeError):
    """A state was used after it was donated.

    ``state, metrics = step(state, batch)`` takes over the buffers of the state passed in. They now hold the
    new values, and any use of the old handle, or of a leaf taken from it, raises. Causes:

    - The result has another name. Bind it to the same one: ``state, metrics = step(state, batch)``.
    - A leaf is kept for later. Copy it before the call: ``w = state.params["w"].clone()``.
    - The old state is needed. ``old = fcg.snapshot(state)`` copies it; ``other = fcg.fork(state)`` is a
      second, independent state.
    - An exception or Ctrl-C came between the call and the assignment: ``state = state.latest()``.
    """


class AliasError(FunctionalCGError, ValueError):
    """Two leaves of a state share memory.

    Each leaf has memory of its own, so two names of one tensor would drift apart or be updated twice. Causes:

    - Tied weights. Keep one name and read it twice::

        params = {"wte": wte}                                # not {"wte": wte, "head": wte}
        logits = hidden @ params["wte"].T

    - A target network or an average that starts as the parameters: ``ema=fcg.tree.map(torch.clone, params)``.
    - Views of one buffer, such as the rows of a stacked tensor: ``.clone()`` each.
    """


class ReadOnlyError(FunctionalCGError, RuntimeError):
    """A leaf of a state, or a constant, was written to.

    A state changes only by what the step returns, ``state.replace(...)`` or ``fcg.tree.at(...)``. Inputs are copied
    in: a step may write its own copy, which changes nothing for the caller. Causes:

    - An in-place update: ``state["w"] -= g`` becomes ``state = state.replace(w=state["w"] - g)``; inside a
      step, ``return {**state, "w": state["w"] - g}, metrics``.
    - A module that updates its buffers, such as BatchNorm in training. Return the new ones, as ``fcg.from_module``
      does: ``out, buffers = apply(params, state.buffers, x)``.
    - Code that needs its own copy: ``state["w"].clone()``, or ``fcg.snapshot(state)`` for all of it.

    This is a RuntimeError, never a TypeError: otherwise ``leaf += 1`` would silently rebind the name.
    """


class ForeignTensorError(FunctionalCGError, RuntimeError):
    """The step reads a tensor that is not part of the state, an input or a declared constant.

    A graph would keep reading that address after the tensor is freed or replaced. Causes:

    - A mask or a table in a closure or a global: pass it as an input, or declare it with
      ``@fcg.graph_step(constants=(mask,))``; the step then owns a copy.
    - A module in a closure, whose parameters would never be trained::

        apply, params, buffers = fcg.from_module(model)      # the parameters go into the state
        out, buffers = apply(state.params, state.buffers, x)

    - A tensor kept from an earlier call: keep it in the state.

    Tensors made in the step from Python numbers, such as ``torch.tensor([1.0, 2.0])``, need no declaration.
    """


class HostSyncError(FunctionalCGError, RuntimeError):
    """The step needs the value of a tensor on the host, or a shape that depends on one.

    Replay repeats kernels, not Python: the branch taken at trace time would be taken forever. Causes:

    - ``if loss > 1:``, ``float(loss)``, ``loss.item()``: select on the device, or return it and decide outside::

        loss = torch.where(loss > 1, loss / 2, loss)

    - A Python flag passed as an input becomes a tensor: ``static_argnames=("flag",)`` keeps it in Python.
    - ``x[mask]``, ``nonzero``, ``unique``: keep the shape, ``torch.where(mask, x, 0)``.
    - ``print(loss)``: return it in ``metrics``; ``step.eager(state, batch)`` runs once with real numbers.

    These need nothing on the host: literals, declared constants, buffers that a module reads and the step never
    changes, and what is computed from them alone; one number written where a mask says, ``x[mask] = 0.0``; the lengths
    of ``F.ctc_loss``, which may be inputs; the validation of ``torch.distributions``: ``step.eager`` raises for
    invalid values, and a replay takes them as valid; and what only decides whether to raise, such as
    ``assert (x > 0).all()`` or ``if (x < 0).any(): raise ValueError``. Each replay tests it, and raises a
    ``RuntimeError`` that names the line; on a GPU, the device does, as in ``torch._assert_async``.
    """


class BakedValueError(FunctionalCGError, RuntimeError):
    """A Python value baked into the graph has changed, or differed between two traces.

    A replay would keep using the value of the trace. Where the step does the same with another one, it goes on. Causes:

    - A hyperparameter in a global, a closure or an attribute has changed. Pass it as an input (numbers are live), keep
      it in the state, or name it in ``static_argnames`` if it rarely changes::

        state, metrics = step(state, {**batch, "lr": 0.1})

    - ``model.train()`` or ``model.eval()`` was called on a module that the step calls itself: make one step for each
      mode; an ``apply`` takes ``train=``.
    - A torch mode (autocast, TF32, the default dtype) differs around the call: set it once, or in the step.
    - Autocast, a ``TorchFunctionMode`` or hooks on saved tensors around the call: put them inside the step.
    - ``time.time()`` or a counter: make it an input, or a leaf of the state.
    - A tensor of ``constants=`` was written, or its name rebound to another one: make it an input.
    - A helper or a module was redefined, for example in a notebook: recreate the step, too.

    Some changes go unnoticed: files, clocks, what the system reports; internals of compiled extensions; functions of
    torch that torch's own code reads, as ``nn.ReLU`` reads ``F.relu``; writes through ``.data``; but for CPython 3.11
    to 3.13, computed reads, ``cfgs[i].lr``. ``debug="verify"`` finds their effects.
    """


class ImplicitRandomnessError(FunctionalCGError, RuntimeError):
    """A random op draws from a generator that is not in the state.

    Replay would draw the same numbers each time, or from a generator that is never saved. Draw from a key::

        key = fcg.random.fold_in(state.key, state.step)      # a new one at each step
        x = fcg.random.dropout(key, x, 0.1)
        noise = fcg.random.normal(fcg.random.fold_in(key, 1), x.shape)

    Causes: ``torch.randn`` and the like (``fcg.random.normal``), ``F.dropout`` and ``dropout_p`` of attention
    (``fcg.random.dropout``), modules with dropout (``fcg.from_module`` draws from ``key=``), and random numbers of
    Python or numpy (draw them outside and pass them as an input).
    """


class SideEffectError(FunctionalCGError, RuntimeError):
    """The step does something that replay will not repeat: it keeps a tensor, or changes host state.

    Python runs when the step is traced, never again. Causes:

    - ``losses.append(loss)`` or ``self.loss = loss``: return it and keep it outside::

        state, metrics = step(state, batch)
        losses.append(metrics["loss"])

    - A counter, ``self.calls += 1``: make it a leaf of the state.
    - ``next(iterator)``, ``queue.pop(0)``, ``rng.random()``: call it in the loop, pass the result as an
      input.
    - A hook, a cache or a torch optimizer that stores tensors: pass what it stores through the state.
    - ``breakpoint()``: a debugger works in ``step.eager(state, batch)``, or with ``FCG_DISABLE_CAPTURE=1``.
    """


class StreamError(FunctionalCGError, RuntimeError):
    """Work leaves or enters the capture: an event or a stream was not joined.

    Causes: a side stream that was forked but not joined, or a wait in the step for an event from before it.

    Join forked streams before the step returns, ``torch.cuda.current_stream().wait_stream(side)``. Wait for
    outside work before the call, never in it.
    """


class CaptureError(FunctionalCGError, RuntimeError):
    """Tracing, lowering or capturing failed; the first cause is chained, the state is unchanged.

    Causes:

    - The function itself is wrong (a KeyError, shapes that do not fit): the original exception is shown
      above, with its line. ``step.eager(state, batch)`` runs the function once on real values, for ``print``
      and a debugger.
    - An op that a graph cannot hold, such as ``torch.cond``: compute both sides and select with ``torch.where``.
    - ``loss.backward()``: ``loss, grads = fcg.value_and_grad(loss_fn)(state.params)``.
    - ``debug="verify"`` found a replay unlike the eager run: a kernel with hidden state or atomics.
    - ``optim.from_torch(cls)`` cannot turn an optimizer class into a pure function, and says why: use a
      transformation of ``fcg.optim``, or write the formula as one.
    """


class MiscompileError(FunctionalCGError, RuntimeError):
    """The compiled step computes something other than the step itself.

    Before the first call of a compiled step changes the state, the step is compared with its calls run one by
    one: on the values of the call and on others made from them. So are calls 2, 4, 8 and so on, or those that
    ``certify`` names, before their state counts; with ``debug="verify"`` so are the first calls, which by then
    have committed. The error names each leaf or metric whose difference rounding does not explain, and the line
    that computes it. What rounding explains is measured, by runs with results perturbed by an ulp. Causes:

    - A bug in the compiler, or in this package: please report it, with the step. ``lowering="aten"`` runs the
      calls as they are.
    - A call that does not return the same for the same arguments, such as a kernel with atomics or a custom
      operator that keeps state: ``torch.use_deterministic_algorithms(True)``, or compute it outside the step.

    ``certify=False`` skips the comparison; ``step.explain()`` tells at which calls it was made.
    """


class RankError(CaptureError):
    """The ranks of a mesh have diverged: one is missing, has ended, or does something else.

    Computation over sharded leaves is collective, and a rank alone in it would wait forever. Causes:

    - A call on some ranks only. Call it on all of them, and use the result on one::

        text = sample(state)                                 # on all ranks
        if mesh.rank == 0:
            print(text)

    - Inputs of another layout on one rank, such as a shorter last batch: ``DataLoader(..., drop_last=True)``.
    - Other steps, or another order of calls, because a condition differs between ranks.
    - A rank raised an error of its own, or was killed: read its message, and start again from the last file.
      The state of the others is that of their last step.
    - ``torch.distributed.destroy_process_group()`` before the last call: a mesh shuts down what it started.
    - A leaf that all ranks hold whole would get different values: apply ``sharding.mean`` to what is computed
      from data.
    """


class ClosedError(FunctionalCGError, RuntimeError):
    """A step was used after ``close()``, or after its ``with`` block.

    Closing frees the captures and their memory. States stay valid; make a new step, or close later::

        with fcg.graph_step(train) as step:
            for batch in loader:
                state, metrics = step(state, batch)
        state.params                                         # still good
    """


class BusyError(FunctionalCGError, RuntimeError):
    """A step or a state was used in the middle of a call that is using it, or was lost to a fork.

    Another thread would wait for that call to end; code on the same thread cannot. Causes:

    - A signal handler calls a step, or writes a state, while the main program is in a call. Handlers may read
      (``fcg.save``, ``fcg.snapshot``, another ``graph_fn``) and raise; for anything else set a flag, and
      check it in the loop::

        signal.signal(signal.SIGUSR1, lambda number, frame: flags.add("lower the rate"))

    - A finalizer does, ``__del__`` or a weak reference callback: these run wherever Python collects garbage.
    - Another process saves checkpoints in the folder.
    - A process was forked while another thread was in a long call, or its state lives on a GPU: in the child,
      ``state = fcg.load(path, ...)``; or fork first, and make states afterwards.
    - A process was forked while another thread was drawing random numbers, and the child traces a step: fork between
      draws, or start processes by spawn.
    """


class AsleepError(FunctionalCGError, RuntimeError):
    """A state was used between ``fcg.sleep`` and ``fcg.wake``.

    Its memory on the device is given back meanwhile, and all handles and leaves of the state with it. Nothing is lost::

        state = fcg.sleep(state)
        texts = generate(policy)                             # with the memory that was the state's
        state = fcg.wake(state)
        state, metrics = step(state, texts)                  # the capture is still good

    What is needed meanwhile, take before: ``params = fcg.snapshot(state.params)``, or save it.
    """


class ResultError(FunctionalCGError, RuntimeError):
    """The result of a call could not be built, after the call was done.

    A class among the metrics raised while its object was built from leaves (``tree_unflatten``,
    ``__post_init__``). The call is not repeated and nothing is lost: the error holds what was computed::

        try:
            state, metrics = step(state, batch)
        except fcg.ResultError as error:
            state, leaves = error.state, error.leaves

    Attributes:
      state: The new state; None for a function that returns none.
      leaves: Tensors of the metrics, in flat order.
    """

    state: Any = None
    leaves: Sequence[Any] = ()
