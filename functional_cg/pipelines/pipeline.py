"""A pipeline as a value: which ranks compute which stages of a loss, in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.running import running
from ..ambient.setting import canonical
from ..errors import LayoutError
from ..manual import Documented
from ..messages.tracebacks import entry
from ..random.arguments import check_key
from ..shards.mesh import Axis, Mesh
from ..shards.peers import together
from ..shards.placement import Holders
from ..shards.reader import Source
from ..shards.tensor import Sharded, refuse_at_rest
from ..shards.zero import Zero
from ..state.leaf import owned
from ..transforms.autodiff import refuse_undifferentiable
from ..transforms.microbatches import sliced
from ..tree import path_string
from .actions import Table
from .execution import Worker
from .gradients import gradients, results
from .links import Links
from .order import described
from .schedules import NAMES, forward_of, table_of
from .stages import Layout, Rehearsal, rehearse
from .tape import contiguous_strides, cut

__all__ = ["Pipeline"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Pipeline(metaclass=Documented):
    """A pipeline over the stage axis of a mesh; made by :func:`functional_cg.sharding.pipeline`.

    Attributes:
      mesh: The ranks that hold the same stages as this one, ``mesh.size`` of them: each reads its own data.
      schedule: Name of the schedule, or its rows.
      microbatches: Number of micro-batches.
      links: Makes process groups between stages.
      groups: Names of those of this rank's transfers, by pair of ranks (from, to).
    """

    mesh: Mesh
    schedule: str
    microbatches: int
    links: Links
    groups: Mapping[tuple[int, ...], str]

    @property
    def stages(self) -> Axis:
        """The axis of the ranks that compute other stages."""
        assert self.mesh.stages is not None
        return self.mesh.stages

    def __str__(self) -> str:
        name = self.schedule if self.schedule in NAMES else "a table of the user"
        return f"pipeline({name}, microbatches={self.microbatches}) on {self.mesh}"

    def zero(
        self,
        fn: Callable[..., Any],
        params: Any,
        batch: Any,
        *args: Any,
        key: Tensor | None = None,
        stage: Literal[1, 2, 3] = 1,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Zero:
        """Shard a state over the pipeline: ``TrainState.create(..., sharding=pipe.zero(loss_fn, params, batch))``.

        A rank holds the parameters that its stages read, and their moments; the loss is run once on shapes to find
        them. What stages of several ranks read, such as a tied embedding, is held by each of them. Over the ranks that
        hold the same stages, ``stage`` shards as :func:`functional_cg.sharding.zero` does. All ranks call it.

        Args:
          fn: The loss, as for :meth:`value_and_grad`.
          params: The parameters; their shapes and dtypes count, so they may be on the meta device.
          batch: A batch of this rank, and the further arguments of the loss; of tensors, only shapes and dtypes count.
          key: Its key.
          stage: 1, 2 or 3, of ZeRO.
          param_dtype: Dtype that the loss sees.
          reduce_dtype: Dtype in which gradients are summed over ranks.
          has_aux: Whether the loss returns a pair.
        Raises:
          LayoutError: If a parameter is not floating, or the loss or the batch cannot be cut.
          RankError: If a rank does not call it, or finds other readers of a parameter.
          ValueError: If ``stage`` is not 1, 2 or 3, or the loss has another number of stages than the schedule.

        Example:
          >>> import torch, functional_cg as fcg
          >>> pipe = fcg.sharding.pipeline(fcg.sharding.mesh({"stage": -1}), microbatches=2)
          >>> loss_fn = lambda params, x: (pipe.cut(x * params["w"]) * params["v"]).mean()
          >>> params, x = {"w": torch.tensor(2.0), "v": torch.tensor(3.0)}, torch.ones(4)
          >>> zero = pipe.zero(loss_fn, params, x)
        """
        name = getattr(fn, "__name__", type(fn).__name__)
        if stage not in (1, 2, 3):
            raise ValueError(
                f"pipe.zero: stage must be 1, 2 or 3, got {stage!r}.\n"
                "To fix: `stage=1` shards the state of the optimizer over ranks that hold the same stages."
            )
        flat, treedef = pytree.flatten(params)
        refuse_undifferentiable(name, treedef, flat)
        layouts = [
            (tuple(leaf.shape), contiguous_strides(leaf.shape), param_dtype or leaf.dtype) for leaf in flat
        ]
        call = _Call(name, fn, treedef, batch, args, {"key": key, **kwargs})
        with canonical(self.mesh):
            found = self._rehearsed(call, layouts, has_aux=has_aux)[0]
        table = self._table(found)
        readers = [
            tuple(sorted({table.owners[n] for n, one in enumerate(found.stages) if i in one.reads})) or (0,)
            for i in range(len(flat))
        ]
        together(self.links.mesh, "pipe.zero", "\n".join(["place parameters in stages", *map(str, readers)]))
        groups = self.links.for_sets(sorted({ranks for ranks in readers if len(ranks) > 1}))
        holders = [
            None if self.stages.size == 1 else Holders(self.stages, ranks, groups.get(ranks, ""))
            for ranks in readers
        ]
        return Zero(
            self.mesh, stage, param_dtype=param_dtype, reduce_dtype=reduce_dtype, holders=tuple(holders)
        )

    def _table(self, found: Rehearsal) -> Table:
        return table_of(self.schedule, self.stages.size, self.microbatches, len(found.stages))

    def cut(self, tree: T) -> T:
        """Begin the next stage of a loss with these values: they are what is sent to its rank.

        Outside of :meth:`value_and_grad` and :meth:`value` it returns the tree itself.

        Args:
          tree: A pytree of tensors; other leaves stay as they are.
        Raises:
          LayoutError: If it is called in a part of the loss that the backward computes again.

        Example:
          >>> import torch, functional_cg as fcg
          >>> pipe = fcg.sharding.pipeline(fcg.sharding.mesh({"stage": -1}), microbatches=2)
          >>> pipe.cut({"x": torch.ones(2), "layer": 3})
          {'x': tensor([1., 1.]), 'layer': 3}
        """
        return cut(tree)

    def value_and_grad(
        self, fn: Callable[..., Any], *, has_aux: bool = False, dtype: torch.dtype | None = None
    ) -> Callable[..., Any]:
        """Make a function that returns the value of ``fn`` and its gradient, computed stage by stage.

        It is ``fcg.microbatches(m)(fcg.value_and_grad(fn))``, except that stages run on their ranks, and that the
        gradient of a leaf that several stages read is the sum of theirs, each summed over micro-batches first.

        Args:
          fn: ``fn(params, batch, ..., key=key)``, as for :func:`functional_cg.microbatches`; stages begin at the values
            that it hands to :meth:`cut`.
          has_aux: Whether it returns a pair (scalar, auxiliary tree of tensors).
          dtype: Dtype in which gradients and floating results are summed and returned; by default their own.
        Returns:
          A function with the arguments of ``fn`` that returns ``(value, grads)``, or ``((value, aux), grads)``. All
          ranks of a pipeline get the value; ``grads`` lie where the parameters do.
        Raises:
          LayoutError: If the batch cannot be cut into micro-batches, or the loss hands a value past a cut, writes into
            what it got through one, or reads a leaf that its rank does not hold.
          CaptureError, HostSyncError: If micro-batches draw from one key, or the loss asks for a value on the host.
          ValueError: If the loss has another number of stages than the schedule.

        Example:
          >>> import torch, functional_cg as fcg
          >>> pipe = fcg.sharding.pipeline(fcg.sharding.mesh({"stage": -1}), microbatches=2)
          >>> loss_fn = lambda params, x: (pipe.cut(x * params["w"]) * params["v"]).mean()
          >>> params = {"w": torch.tensor(2.0), "v": torch.tensor(3.0)}
          >>> pipe.value_and_grad(loss_fn)(params, torch.ones(4))
          (tensor(6.), {'w': tensor(3.), 'v': tensor(2.)})
          >>> pipe.value(loss_fn)(params, torch.ones(4))
          tensor(6.)
        """
        name = getattr(fn, "__name__", type(fn).__name__)

        @entry(f"pipe.value_and_grad({name})(state.params, batch)")
        @functools.wraps(fn)
        def wrapped(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            flat, treedef = pytree.flatten(params)
            refuse_undifferentiable(name, treedef, flat)
            refuse_at_rest(flat, "gradients")
            call = _Call(name, fn, treedef, batch, args, kwargs)
            value, grads = self._computed(call, flat, dtype, has_aux=has_aux)
            return value, pytree.unflatten(treedef, grads)

        return wrapped

    def value(self, fn: Callable[..., Any], *, dtype: torch.dtype | None = None) -> Callable[..., Any]:
        """Make a function that returns what ``fn`` does, stage by stage and without gradients: an evaluation.

        It is ``fcg.microbatches(m)(fn)``, of any tree of tensors, on all ranks: the example of :meth:`value_and_grad`.
        """
        name = getattr(fn, "__name__", type(fn).__name__)

        @entry(f"pipe.value({name})(state.params, batch)")
        @functools.wraps(fn)
        def wrapped(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            flat, treedef = pytree.flatten(params)
            refuse_at_rest(flat, "a result")
            call = _Call(name, fn, treedef, batch, args, kwargs)
            return self._computed(call, flat, dtype, forward_only=True)[0]

        return wrapped

    def _computed(
        self,
        call: _Call,
        leaves: Sequence[Any],
        dtype: torch.dtype | None,
        *,
        forward_only: bool = False,
        has_aux: bool = False,
    ) -> tuple[Any, list[Tensor]]:
        """Return the result of a loss, and the gradients of the leaves; none with ``forward_only``."""
        how = {"has_aux": has_aux, "forward_only": forward_only}
        found, slices = self._rehearsed(call, list(map(_layout_of, leaves)), **how)
        table = forward_of(self._table(found)) if forward_only else self._table(found)
        running().announce(f"{self}, {described(table)}")
        _refuse_elsewhere(call, found, table, leaves, self.stages)
        rank = self.stages.rank
        with torch.no_grad():
            read = {i for n, stage in enumerate(found.stages) if table.owners[n] == rank for i in stage.reads}
            values = {i: _read(leaves[i]) for i in sorted(read)}
            key, device = call.kwargs.get("key"), self.mesh.device
            worker = Worker(table, rank, found, values, slices, key, self.groups, dtype, device)
            of_grads, of_results = worker.work()
            grads = [] if forward_only else gradients(found, table, of_grads, leaves, dtype)
            value = results(found, table, of_results, self.stages, dtype)
        return pytree.unflatten(found.structure, value), grads

    def _rehearsed(
        self, call: _Call, params: Sequence[Layout], **how: bool
    ) -> tuple[Rehearsal, Sequence[Tensor]]:
        """Take a loss apart, of leaves of some layouts; return it, and the leaves of the batch in slices."""
        slices, structure = sliced(call.name, call.batch, self.microbatches, call.args)
        keyed = call.kwargs.get("key") is not None
        if keyed:
            check_key(call.kwargs["key"])
        others = {name: value for name, value in call.kwargs.items() if name != "key"}

        def loss(leaves: Sequence[Tensor], part: Sequence[Tensor], key: Tensor | None) -> Any:
            trees = pytree.unflatten(call.params, leaves), pytree.unflatten(structure, part)
            return call.fn(*trees, *call.args, **others, **({} if key is None else {"key": key}))

        parts = [(tuple(leaf.shape[1:]), leaf.stride()[1:], leaf.dtype) for leaf in slices]
        how |= {"keyed": keyed, "several": self.microbatches > 1}
        return rehearse(call.name, loss, params, parts, self.mesh.device, **how), slices


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a loss.

    Attributes:
      name: Its name.
      fn: The loss.
      params: Structure of its first argument.
      batch: Its second argument.
      args: The further ones.
      kwargs: Those by name; its key, too.
    """

    name: str
    fn: Callable[..., Any]
    params: pytree.Treedef
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _read(leaf: Tensor) -> Tensor:
    if isinstance(leaf, Sharded):
        return Source(leaf, leaf.local).read_here()
    return cast("Tensor", owned(leaf).detach())


def _layout_of(leaf: Tensor) -> Layout:
    """Return the layout in which a loss sees a leaf."""
    if not isinstance(leaf, Sharded):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    placement = leaf.placement
    dtype = placement.reading.param_dtype or leaf.dtype
    stride = contiguous_strides(placement.shape) if placement.partial else leaf.local.stride()
    return placement.shape, stride, dtype


def _refuse_elsewhere(
    call: _Call, found: Rehearsal, table: Table, leaves: Sequence[Tensor], stages: Axis
) -> None:
    """Raise if a stage reads a leaf that its rank does not hold."""
    rows = []
    for number, (path, leaf) in enumerate(zip(call.params.paths(), leaves, strict=True)):
        reading = sorted({table.owners[n] for n, stage in enumerate(found.stages) if number in stage.reads})
        holders = leaf.placement.holders if isinstance(leaf, Sharded) else None
        held = range(stages.size) if stages.size == 1 else () if holders is None else holders.ranks
        if not set(reading) <= set(held):
            has = "on no rank of a pipeline" if holders is None else str(holders)
            ranks = f"rank{'s' * (len(reading) > 1)} {' and '.join(map(str, reading))}"
            rows.append(
                f"{path_string(path, 'params')}  read on {ranks} of {stages.name}={stages.size}   {has}"
            )
    if rows:
        raise LayoutError.of(
            call.name,
            "reads leaves in stages whose ranks do not hold them.",
            rows=rows,
            why="Each rank holds the parameters that its stages read, as found when the state was created.",
            fix="`TrainState.create(..., sharding=pipe.zero(loss_fn, params, batch))`, with the same loss.",
        )
