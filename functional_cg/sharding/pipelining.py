"""Make a pipeline: the process groups of its transfers, and the mesh of the ranks that hold the same stages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..messages.tracebacks import entry
from ..pipelines.links import Links
from ..pipelines.pipeline import Pipeline
from ..pipelines.schedules import edges_of, text_of
from ..pipelines.torch_tables import TORCH_NAMES, load
from ..shards.mesh import Axis, Mesh
from ..shards.peers import together
from .launch import check_mesh

__all__ = ["pipeline", "refuse_moving_memory"]


@entry("pipe = fcg.sharding.pipeline(mesh, schedule='1f1b', microbatches=8)")
def pipeline(
    mesh: Mesh,
    *,
    schedule: str | Iterable[str | Sequence[str]] = "1f1b",
    microbatches: int,
    axis: str = "stage",
) -> Pipeline:
    """Lay out a loss in stages over one axis of a mesh; all ranks call it, in the same order.

    On a mesh whose stage axis has one rank, nothing is sent: the same program then runs all stages, and gives the bits
    that a pipeline gives, except with ``looped_bfs``, which adds gradients in another order.

    Args:
      mesh: A mesh with an axis for stages, ``fcg.sharding.mesh({"stage": 2, "data": -1})``.
      schedule: ``gpipe`` or ``1f1b``, with one stage per rank; ``interleaved``, ``zero_bubble`` or ``looped_bfs``, with
        two or more; ``zbv`` or ``dualpipev``, with two, the last stage on the first rank; or a table: a line of actions
        for each rank, ``0F0,0F1,0B0,0B1``, as text or as lists. Transfers are placed for it.
      microbatches: Number of micro-batches that a batch is cut into.
      axis: Name of the axis.
    Raises:
      LayoutError: If a table is not complete, or would wait for ever.
      RankError: If a rank does not call it, or calls it with another schedule.
      TypeError: If an argument has the wrong type.
      RuntimeError: On GPUs, if the allocator has expandable segments and NCCL registers the buffers of graphs.
      ValueError: If the mesh has no such axis, or there is no such schedule.

    Example:
      >>> import torch, functional_cg as fcg
      >>> mesh = fcg.sharding.mesh({"stage": 1, "data": -1})
      >>> pipe = fcg.sharding.pipeline(mesh, schedule="1f1b", microbatches=2)
      >>> def loss_fn(params, x):
      ...     x = pipe.cut(x * params["w"])
      ...     return (x * params["v"]).mean()
      >>> params = {"w": torch.tensor(2.0), "v": torch.tensor(3.0)}
      >>> pipe.value_and_grad(loss_fn)(params, torch.ones(4))
      (tensor(6.), {'w': tensor(3.), 'v': tensor(2.)})
    """
    check_mesh(mesh, "pipeline", '{"stage": 2, "data": -1}')
    if type(microbatches) is not int or microbatches < 1:
        raise TypeError(f"sharding.pipeline: microbatches must be a positive integer, got {microbatches!r}")
    names = [one.name for one in mesh.axes]
    if axis not in names:
        raise ValueError(
            f"sharding.pipeline: the mesh, {mesh}, has no axis {axis!r}.\n"
            f'To fix: `fcg.sharding.mesh({{"{axis}": 2, "data": -1}})`; or the name of its axis, `axis="{names[0]}"`.'
        )
    schedule = text_of(schedule)
    place = names.index(axis)
    stages = mesh.axes[place]
    others = (*mesh.axes[:place], *mesh.axes[place + 1 :]) or (Axis("data", 1, 0, ""),)
    if mesh.device.type == "cuda" and stages.size > 1:
        refuse_moving_memory(os.environ)
    if schedule in TORCH_NAMES and stages.size > 1:
        load()
    links = Links(mesh, place)
    edges = edges_of(schedule, stages.size)
    together(mesh, "sharding.pipeline", f"lay out a pipeline over {axis}\n{schedule}")
    groups = links.for_pairs(edges)
    ranks = None if mesh.ranks is None else mesh.ranks.in_groups(links.of_stages())
    home = replace(mesh, axes=others, ranks=ranks, stages=stages)
    return Pipeline(home, schedule, microbatches, links, groups)


def refuse_moving_memory(environment: Mapping[str, str]) -> None:
    """Raise if captured transfers would hang: NCCL takes a buffer that it registers to be one allocation.

    Args:
      environment: Variables of the process.
    Raises:
      RuntimeError: Naming the variable to set.
    """
    settings = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    expandable = "expandable_segments:true" in settings.lower().replace(" ", "")
    if expandable and environment.get("NCCL_GRAPH_REGISTER") != "0":
        raise RuntimeError(
            "sharding.pipeline: the allocator has expandable segments, and NCCL registers the buffers that a graph "
            "sends: captured sends are known to hang so.\n"
            "To fix: `NCCL_GRAPH_REGISTER=0` in the environment of all ranks; or no `expandable_segments:True` in "
            "`PYTORCH_CUDA_ALLOC_CONF`."
        )
