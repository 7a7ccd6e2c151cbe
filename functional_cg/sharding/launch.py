"""Make a mesh from the launcher's environment; start and end torch's process groups."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..messages.tracebacks import entry
from ..shards.coalescing import all_groups
from ..shards.groups import Captures
from ..shards.mesh import Axis, Mesh
from .agreement import Ranks
from .watchdog import Watchdog

__all__ = ["check_mesh", "end_groups", "mesh"]

_LONGEST = 1e6  # seconds, more than a week; torch counts in integers, which have no infinity
_GRACE = 30.0  # seconds in which what notices a missing rank by itself has raised


@entry("mesh = fcg.sharding.mesh({'data': -1})")
def mesh(
    axes: Mapping[str, int],
    *,
    device: str | None = None,
    timeout: float = 300.0,
    step_timeout: float | None = None,
) -> Mesh:
    """Lay out all ranks of this run on a mesh. Call it once, before anything touches a GPU.

    Under ``torchrun`` (or any launcher that sets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``) it selects this rank's device, starts NCCL (gloo on the CPU), and shuts it down when the
    interpreter exits. Existing process groups are used and left to their owner. A single process is a mesh of one rank,
    and nothing is started.

    Args:
      axes: Names and sizes, outermost first: ``{"data": -1}``, or ``{"replica": 2, "shard": -1}`` for a hybrid. Leaves
        are sharded over the last axis, and replicated over the one before; :func:`pipeline` puts stages on one of them.
        One size may be -1: it takes the remaining ranks.
      device: ``"cuda"`` or ``"cpu"``; by default CUDA if available.
      timeout: Seconds that ranks wait for each other before a capture and in collectives, except captured ones on GPUs.
      step_timeout: Seconds that a call of a captured step may take that waits for other ranks. Then the process prints
        the call, the missing ranks and the stacks of all threads, and ends with exit code 75. By default 30 more than
        ``timeout``; ``math.inf`` for no limit.
    Raises:
      RuntimeError: If the launcher has not set a variable that a rank needs, there are more ranks on this machine than
        GPUs, or ``device`` is ``"cuda"`` and there is no GPU.
      TypeError: If an argument has the wrong type.
      ValueError: If there are not one or two axes whose sizes multiply to the number of ranks, or ``device``,
        ``timeout`` or ``step_timeout`` has no valid value.

    Example:
      >>> import functional_cg as fcg
      >>> print(fcg.sharding.mesh({"data": -1}))
      data=1
    """
    _refuse_arguments(axes, device, timeout)
    limit = timeout + _GRACE if step_timeout is None else step_timeout
    if not _is_number(limit) or not limit > 0:
        raise ValueError(
            f"sharding.mesh: step_timeout must be a positive number of seconds, or math.inf, got {step_timeout!r}"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = dist.get_world_size() if dist.is_initialized() else _number("WORLD_SIZE", "1")
    sizes = _sizes(axes, ranks)
    if ranks == 1:
        return Mesh(tuple(Axis(name, 1, 0, "") for name in sizes), torch.empty(0, device=device).device)
    ours = not dist.is_initialized()
    if ours:
        _start(device, timeout)
    here = torch.empty(0, device=device).device
    ranks_here = Ranks.of_this_run(timeout)
    watchdog = Watchdog(ranks_here, limit)
    found = Mesh(_axes(sizes, device, timeout), here, ranks=ranks_here, watchdog=watchdog)
    atexit.register(_end, found.captures, ranks_here, watchdog, ours=ours)
    return found


def check_mesh(value: Any, function: str, axes: str = '{"data": -1}') -> None:
    """Refuse what is no mesh of this package.

    Raises:
      TypeError: Naming the function that it was passed to.
    """
    if not isinstance(value, Mesh):
        raise TypeError(
            f"sharding.{function}: mesh must be made with `fcg.sharding.mesh(...)`, got {type(value).__name__}.\n"
            f"To fix: `mesh = fcg.sharding.mesh({axes})`."
        )


def _axes(sizes: Mapping[str, int], device: str, timeout: float) -> tuple[Axis, ...]:
    wide = [name for name, size in sizes.items() if size > 1]
    if len(wide) == 1:  # this axis spans all ranks: use the default group
        rank, everyone = dist.get_rank(), dist.distributed_c10d._get_default_group().group_name
        return tuple(
            Axis(name, size, rank, everyone) if name in wide else Axis(name, 1, 0, "")
            for name, size in sizes.items()
        )
    layout = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # else the timeout is half an hour, whatever the default group's is
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), layout.get_group(name))
    return tuple(
        Axis(name, size, layout.get_local_rank(name), layout.get_group(name).group_name)
        for name, size in sizes.items()
    )


def _sizes(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    sizes = dict(axes)
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and known > 0 and ranks % known == 0:
        sizes[free[0]] = ranks // known
    if not 1 <= len(sizes) <= 2 or math.prod(sizes.values()) != ranks or min(sizes.values()) < 1:
        raise ValueError(
            f"sharding.mesh: {dict(axes)} does not lay out {ranks} rank{'s' * (ranks != 1)}. To fix: one or two axes "
            'whose sizes multiply to the number of ranks, `{"data": -1}`; `torchrun --nproc_per_node=N` sets it.'
        )
    return sizes


def _start(device: str, timeout: float) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise _incomplete(name)
    place, limit = None, timedelta(seconds=timeout)
    if device == "cuda":
        place = _gpu(_number("LOCAL_RANK"), torch.cuda.device_count())
        torch.cuda.set_device(place)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # One `torchrun` keeps one store over all of its restarts, with the addresses of ranks that are gone.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=place)


def _gpu(rank: int, gpus: int) -> torch.device:
    """Return the device of a rank from its number on this machine."""
    if rank >= gpus:
        raise RuntimeError(
            f"sharding.mesh: LOCAL_RANK is {rank}, and torch sees {gpus} GPU{'s' * (gpus != 1)} on this machine. "
            "Two ranks on one GPU would wait for each other for ever. To fix: "
            f"`torchrun --nproc_per_node={gpus or 1} train.py`, and no smaller `CUDA_VISIBLE_DEVICES`; "
            'without a GPU, `sharding.mesh(..., device="cpu")`.'
        )
    return torch.device("cuda", rank)


def _number(name: str, default: str | None = None) -> int:
    """Read an integer from the environment."""
    text = os.environ.get(name, default)
    if text is None:
        raise _incomplete(name)
    if not text.isdecimal():
        raise RuntimeError(f"sharding.mesh: {name} is {text!r}, expected an integer, as `torchrun` sets it.")
    return int(text)


def _incomplete(name: str) -> RuntimeError:
    return RuntimeError(
        f"sharding.mesh: {name} is not set, and there are {os.environ.get('WORLD_SIZE')} ranks. To fix: "
        "`torchrun --nproc_per_node=N train.py`; another launcher sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT for each rank."
    )


def _refuse_arguments(axes: Any, device: Any, timeout: Any) -> None:
    if not isinstance(axes, Mapping):
        raise TypeError(
            f'sharding.mesh: axes must be a dict of names and sizes, got {axes!r}. To fix: `{{"data": -1}}`.'
        )
    for name, size in axes.items():
        if not (isinstance(name, str) and name and isinstance(size, int)) or isinstance(size, bool):
            raise TypeError(
                f"sharding.mesh: an axis has a text as its name and an integer as its size, got {name!r}: {size!r}. "
                'To fix: `{"data": -1}`.'
            )
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'sharding.mesh: device must be "cuda" or "cpu", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError('sharding.mesh: torch sees no GPU. To fix: `sharding.mesh(..., device="cpu")`.')
    if not _is_number(timeout) or not 0 < timeout <= _LONGEST:
        raise ValueError(
            f"sharding.mesh: timeout must be a positive number of seconds, {_LONGEST:g} at most, got {timeout!r}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _end(captures: Captures, ranks: Ranks, watchdog: Watchdog, *, ours: bool) -> None:
    """Clean up at exit: graphs first, then the communicators that they use. The other order hangs."""
    watchdog.stop()
    captures.close()
    if ours and dist.is_initialized():
        ranks.part()
        end_groups()


def end_groups() -> None:
    """End all process groups: first those that were split from the one of all ranks, side by side, then that one.

    The end of a communicator waits for its other ranks, so a pipeline's four or five took more than a second one after
    the other. NCCL lets each thread end another one, and as each waits by itself, no order of ends can deadlock.

    Raises:
      Exception: The first that an end has raised, once all have come to theirs.
    """
    everyone, errors, threads = dist.group.WORLD, list[Exception](), list[threading.Thread]()

    def end(group: Any) -> None:
        try:
            dist.destroy_process_group(group)
        except Exception as error:
            errors.append(error)

    for group in all_groups():
        if group is not everyone:
            thread = threading.Thread(target=end, args=(group,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Python 3.12.1 starts no thread while it ends
                end(group)
            else:
                threads.append(thread)
    for thread in threads:
        thread.join()
    end(None)
    if errors:
        raise errors[0]
