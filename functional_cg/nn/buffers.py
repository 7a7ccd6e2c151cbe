"""Read and set the buffers of a module by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CaptureError, SideEffectError
from ..messages.source import at_here
from ..state.arena import BufferSpec

__all__ = [
    "buffer_at",
    "buffers_set",
    "refuse_changed_buffers",
    "resized_buffers",
    "seal",
    "set_buffers",
    "unset_buffers",
]


def buffer_at(module: nn.Module, path: str) -> Tensor | None:
    """Return a buffer of a module or a submodule; None if there is none."""
    part, _, name = path.rpartition(".")
    return module.get_submodule(part)._buffers.get(name)


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Let a module and its submodules hold these tensors as buffers, by path."""
    for path, value in values.items():
        part, _, name = path.rpartition(".")
        module.get_submodule(part)._buffers[name] = value


def resized_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, by path, the buffers that are of another shape, dtype or device than before."""
    now = {path: buffer_at(module, path) for path in before}
    return {
        path: one
        for path, one in now.items()
        if one is not None and one is not before[path] and BufferSpec.of(one) != BufferSpec.of(before[path])
    }


def buffers_set(module: nn.Module) -> dict[str, bool]:
    """Map each buffer of a module and its submodules to whether it is a tensor rather than None."""
    return {
        f"{path}.{name}" if path else name: buffer is not None
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()  # `named_buffers` leaves out those that are None
    }


def unset_buffers(module: nn.Module) -> list[str]:
    """List the paths of the buffers that are None."""
    return [path for path, is_set in buffers_set(module).items() if not is_set]


def refuse_changed_buffers(name: str, before: Mapping[str, bool], after: Mapping[str, bool]) -> None:
    """Raise if buffers appeared or disappeared, or if one became None or a tensor.

    Raises:
      SideEffectError: Names each of them.
    """
    changed = [where for where in {**before, **after} if before.get(where) != after.get(where)]
    if not changed:
        return
    shown = {None: "not registered", False: "None", True: "a tensor"}
    attribute = changed[0].rpartition(".")[2]
    fix = f"register it with its first value, `self.register_buffer({attribute!r}, value)`, in `__init__`."
    if before.get(changed[0]):
        fix = f"keep it a tensor, `self.{attribute} = torch.zeros_like(self.{attribute})`."
    raise SideEffectError.of(
        name,
        "its forward changes which buffers the module has.",
        rows=[
            f"`{where}`  before {shown[before.get(where)]}   after {shown[after.get(where)]}"
            for where in changed
        ],
        why="`new_buffers` has the names of `buffers`: another one would be gone after the call.",
        fix=fix,
    )


class _Sealed(dict[str, Any]):
    """The buffers of a module after its forward: a checkpoint that runs it again may write them, in place."""

    def __init__(self, buffers: Mapping[str, Any], name: str, path: str) -> None:
        super().__init__(buffers)
        self._name, self._path = name, path

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and self[key] is value:  # as of `self.count += 1`
            return
        raise CaptureError.of(
            self._name,
            "assigns a buffer while the backward runs the forward again, under `torch.utils.checkpoint`.",
            rows=[f"{self._path}.{key}{at_here()}" if self._path else f"{key}{at_here()}"],
            why="PyTorch would keep what is assigned last, but the forward has returned its buffers already.",
            fix=f"write it in place, which reaches what was returned: `self.{key}.copy_(...)`.",
        )


def seal(module: nn.Module, name: str) -> None:
    """Let nothing assign the buffers of a module, our own copy, any more: that would be lost."""
    for path, part in module.named_modules():
        vars(part)["_buffers"] = _Sealed(part._buffers, name, path)
