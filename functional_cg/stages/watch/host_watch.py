"""The host watch: at each call, compare the host values that the step's Python reads.

A graph bakes these values in. One generated function reads them again at each call and compares by identity
first (0.02 to 0.05 µs per value, ``python -m tests.bench.watch``). So a change raises before anything
is launched, and never replays a stale number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...ambient.kernel_modes import precision_of
from ...ambient.modes import SWITCH
from ...ambient.setting import default_device, foreign_function_modes
from ...errors import BakedValueError
from ...pytree.sameness import same
from .kinds import is_key
from .places import ATTRIBUTE, PART, Entry, How, Place, Step
from .values import Contents, Excerpt, excerpts, is_container, shown

__all__ = ["MODES", "HostWatch", "modes", "refuse_ambient_modes"]

MODES = (
    "torch.is_autocast_enabled('cuda')",
    "torch.is_autocast_enabled('cpu')",
    "torch.get_autocast_dtype('cuda')",
    "torch.get_autocast_dtype('cpu')",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.get_default_dtype()",
    "torch.backends.cuda.flash_sdp_enabled()",
    "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()",
    "torch.backends.cuda.cudnn_sdp_enabled()",
    "torch.get_default_device()",
    "torch.backends.cudnn.enabled",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
)
_CANONICAL = (False, False)
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def modes() -> tuple[object, ...]:
    """Return the current values of `MODES`.

    TF32 is read through ``fp32_precision``: the older names raise once both were used.
    """
    with SWITCH:
        return _modes_now()


def _modes_now() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        precision_of("cuda", "matmul"),
        precision_of("cuda", "conv"),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        default_device(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
    )


def refuse_ambient_modes(function_name: str) -> None:
    """Raise if a mode around the call would change what a trace records, though it does not affect a replay.

    Such modes are autocast, function modes other than that of a default device, and saved-tensor hooks.

    Raises:
      BakedValueError: Naming the mode.
    """
    on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    rows = [
        f"torch.autocast({device!r})  expected off   got {torch.get_autocast_dtype(device)}" for device in on
    ]
    name, inside = "autocast", f"torch.autocast({(on or ['cuda'])[0]!r}, dtype=...)"
    foreign = foreign_function_modes()
    if foreign:
        name = inside = f"{foreign[-1]}()"
        rows = [f"{mode}  expected none   got one that is on" for mode in foreign]
    elif _saved_tensors_hooks(True) is not None:
        name, inside = "hooks on saved tensors", "torch.autograd.graph.saved_tensors_hooks(...)"
        rows = [f"{inside}  expected none   got hooks that are on"]
    elif not torch._C._is_any_autocast_enabled():
        return
    raise BakedValueError.of(
        function_name,
        f"is called under {name}; the state is unchanged.",
        rows=rows,
        why="A step runs as it was traced, with autocast off: what surrounds the call is not a part of it."
        if on
        else "A step runs as it was traced: what surrounds the call is not a part of it.",
        fix=f"put `with {inside}:` inside of `{function_name}`.",
    )


def _key(entry: Entry) -> Any:
    """Return what tells an entry from others of the same run, and is the same in another run."""
    step = entry.step
    at: Any = None if step is None else (step.way, type(step.key), step.key)
    if step is not None and step.way is PART:
        ask = step.key
        args = ask.args if type(ask) is functools.partial else ()
        at = (entry.name, *(one if is_key(one) else id(one) for one in args))
    return id(entry.owner.value), at, entry.how


def _same_old(one: Entry, other: Entry) -> bool:
    if one.how in (How.SAME, How.CONTENTS):
        return same(one.old, other.old) if one.how is How.SAME else bool(one.old == other.old)
    return one.how is How.SHAPE or one.old is other.old


class HostWatch:
    """Host values as they were when the watch was made.

    Args:
      entries: What is compared at each call, beside the modes of torch.
      autocast_dtypes: Whether the dtypes of autocast count, which the step turns on itself.
      half_precision: Whether it counts how torch sums up products of half precision.

    Attributes:
      unchanged: Returns whether no value and no mode has changed. Values of one type count as unchanged if
        they are equal, floats if their bits are equal; a name that no longer exists counts as changed.
    """

    __slots__ = ("_entries", "_modes", "unchanged")

    def __init__(
        self, entries: Sequence[Entry] = (), *, autocast_dtypes: bool = False, half_precision: bool = False
    ) -> None:
        self._entries = tuple(entries)
        self._modes = _CANONICAL + modes()[len(_CANONICAL) :]
        self.unchanged: Callable[[], bool] = _comparison(
            self._entries, self._modes, autocast_dtypes=autocast_dtypes, half_precision=half_precision
        )

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> tuple[str, ...]:
        """Return the watched values as the user writes them."""
        values = (How.SAME, How.CONTENTS, How.IDENTICAL)
        return tuple(
            dict.fromkeys(entry.name for entry in self._entries if entry.how in values and not entry.defines)
        )

    @property
    def identical(self) -> set[int]:
        """Ids of the objects that are compared by identity."""
        return {id(one) for entry in self._entries for one in entry.compared()}

    def differences(self) -> list[tuple[str, object, object]]:
        """Return (name, old, new) for each value and mode that has changed."""
        read = [(entry, _read(entry)) for entry in self._entries]
        changed = [(entry, now) for entry, now in read if now is _GONE or not entry.agrees(now)]
        rows = [(entry.name, *_sides(entry, now)) for entry, now in changed if not entry.defines]
        rows += [
            (name, old, new)
            for name, old, new in zip(MODES, self._modes, modes(), strict=True)
            if not same(new, old)
        ]
        redefined = dict.fromkeys(entry.name for entry, _ in changed if entry.defines)
        return rows + [(name, _DEFINED, _Said("defined anew")) for name in redefined]

    def moved_in(self, later: HostWatch) -> list[tuple[str, object, object]]:
        """Return (name, old, new) for each value that another run of the same code has found to be another one."""
        before = {_key(entry): entry for entry in self._entries}
        pairs = [(before.get(_key(entry)), entry) for entry in later._entries]
        moved = [
            (old, entry)
            for old, entry in pairs
            if old is not None and entry.how is not How.ALIAS and not _same_old(old, entry)
        ]
        return [
            (new.name, *(excerpts(old.old, new.old) if new.how is How.CONTENTS else (old.old, new.old)))
            for old, new in moved
        ]

    def let_go(self) -> None:
        """Forget the objects on the way to what is compared: a program that replaces them needs them no more."""
        for entry in self._entries:
            for place in (entry.owner, entry.old) if entry.how is How.ALIAS else (entry.owner,):
                for one in place.way()[1:]:
                    one.value = None

    def check(self, function_name: str) -> None:
        """Raise if something has changed.

        Raises:
          BakedValueError: Naming each value, as traced and as it is now.
        """
        if self.unchanged():
            return
        refuse_ambient_modes(function_name)
        changed = self.differences()
        if changed:
            raise BakedValueError.of(
                function_name,
                "reads a Python value that the graph has baked in, and that has changed since; the state is unchanged.",
                rows=[f"{name}  traced {shown(old)}   now {shown(new)}" for name, old, new in changed],
                why="Replay repeats kernels, not Python: it would go on with the old value.",
                fix=_fix(*changed[0][:2]),
            )


def _fix(name: str, old: object) -> str:
    if isinstance(old, torch.Tensor):
        return (
            f"a declared constant stays the tensor that it was at the first call: pass `{name}` as an input, keep it "
            "in the state, or make another step."
        )
    if old is _DEFINED:
        return f"make the step anew, `graph_step(fn)`: its graph has the old `{name}` in it."
    if name in MODES:
        return "set the mode before the first call and leave it; for another one make another step."
    if name.endswith(".training"):
        return "make one step for training and one for evaluation; each is captured in its own mode."
    if name.endswith(")") or " in " in name:
        return "make the step anew, `graph_step(fn)`; or decide by an argument that is named in `static_argnames`."
    if isinstance(old, Excerpt):
        return (
            f"pass what is read of `{name}` in the batch, or keep it in the state; else make the step anew."
        )
    argument = name.rpartition(".")[2] if name.rpartition(".")[2].isidentifier() else "name"
    return (
        f"pass `{name}` in the batch (a Python number in the inputs is live) or keep it in the state; if it seldom "
        f'changes, make it an argument of its own and name it in `static_argnames=("{argument}",)`.'
    )


@dataclass(frozen=True)
class _Said:
    """Text that a message shows for an object without a short repr."""

    text: str

    def __repr__(self) -> str:
        return self.text


_DEFINED, _GONE = _Said("as defined then"), _Said("<gone>")


def _read(entry: Entry) -> object:
    try:
        return entry.read()
    except Exception:  # a user's object may raise anything; the value counts as gone
        return _GONE


def _sides(entry: Entry, now: object) -> tuple[object, object]:
    """Return the old and the new side of a change, as a message shows them."""
    if entry.how is How.CONTENTS:
        old, new = excerpts(entry.old, Contents(now) if is_container(now) else entry.old)
        return old, new if is_container(now) else now
    if now is _GONE:
        return (entry.old if entry.how is not How.ALIAS else _Said(f"`{entry.old.name}`")), now
    match entry.how:
        case How.KIND:
            return entry.old, type(now)
        case How.ALIAS:
            return _Said(f"the same object as `{entry.old.name}`"), _Said("another one")
    return entry.old, now


def _comparison(
    entries: Sequence[Entry], then: Sequence[object], *, autocast_dtypes: bool, half_precision: bool
) -> Callable[[], bool]:
    """Generate the function that reads all modes and entries again and compares them.

    Modes are singletons, except the precisions: torch returns a new string or tuple each time. An object from which
    several values are read is looked up once.
    """
    names: dict[str, Any] = {"same": same, **_getters(), **{f"m{i}": mode for i, mode in enumerate(then)}}
    names |= {f"spelt{i}": ("ieee", "none") if then[i] == "ieee" else (then[i],) for i in (5, 6)}
    terms = ["not autocast()", "deterministic() is m4", "benchmark() is m7", "cudnn_deterministic() is m8"]
    terms += ["default_dtype() is m9", "fp32('cuda', 'matmul') in spelt5", "fp32('cuda', 'conv') in spelt6"]
    terms += ["flash() is m10", "mem_efficient() is m11", "math() is m12", "cudnn_attention() is m13"]
    terms += ["cudnn() is m15"]
    usual = "not function_modes() or " if then[14] == torch.device("cpu") else ""
    terms += ["saved_tensors_hooks(True) is None"]
    terms += [f"({usual}(default_device() == m14 and not foreign_function_modes()))"]
    if autocast_dtypes:
        terms += ["autocast_dtype('cuda') is m2", "autocast_dtype('cpu') is m3"]
    if half_precision:
        terms += ["fp16_reduction() == m16", "bf16_reduction() == m17", "fp16_accumulation() is m18"]
        terms += ["math_reduction() is m19"]
    lines = [f"if not ({' and '.join(terms)}): return False"]
    variables: dict[Any, str] = {}

    def named(value: object) -> str:
        text = f"k{len(names)}"
        names[text] = value
        return text

    def part(owner: str, step: Step) -> str:
        key = step.key if step.way is ATTRIBUTE else named(step.key)
        return step.way.format(owner=owner, key=key, name=key)

    def object_at(owner: str, step: Step) -> str:
        where = owner, step.way, type(step.key), step.key
        if where not in variables:
            text = part(owner, step)
            variables[where] = f"p{len(variables)}"
            lines.append(f"{variables[where]} = {text}")
        return variables[where]

    def variable(place: Place) -> str:
        root, *places = place.way()
        found = variables.setdefault(root, variables.get(root) or named(root.value))
        for one in places:
            assert one.step is not None
            found = object_at(found, one.step)
        return found

    for entry in entries:
        now = variable(entry.owner)
        if entry.step is not None and entry.how is How.KIND:
            now = object_at(now, entry.step)
        elif entry.step is not None:
            lines.append(f"now = {part(now, entry.step)}")
            now = "now"
        old = variable(entry.old) if entry.how is How.ALIAS else named(entry.old)
        lines.append(f"if {entry.how.differs.format(now=now, old=old)}: return False")
    body = "".join(f"        {line}\n" for line in lines)
    source = f"def unchanged():\n    try:\n{body}        return True\n    except Exception:\n        return False\n"
    exec(compile(source, "<functional_cg watch>", "exec"), names)
    return cast("Callable[[], bool]", names["unchanged"])


def _getters() -> dict[str, Any]:
    # torch's Python wrappers around these cost more than the rest of a call.
    return {
        "autocast": torch._C._is_any_autocast_enabled,
        "autocast_dtype": torch.get_autocast_dtype,
        "deterministic": torch._C._get_deterministic_algorithms,
        "fp32": torch._C._get_fp32_precision_getter,
        "cudnn": torch._C._get_cudnn_enabled,
        "fp16_reduction": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        "bf16_reduction": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": torch._C._get_cublas_allow_fp16_accumulation,
        "math_reduction": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
        "benchmark": torch._C._get_cudnn_benchmark,
        "cudnn_deterministic": torch._C._get_cudnn_deterministic,
        "default_dtype": torch.get_default_dtype,
        "flash": torch._C._get_flash_sdp_enabled,
        "mem_efficient": torch._C._get_mem_efficient_sdp_enabled,
        "math": torch._C._get_math_sdp_enabled,
        "cudnn_attention": torch._C._get_cudnn_sdp_enabled,
        "saved_tensors_hooks": _saved_tensors_hooks,
        "function_modes": torch._C._len_torch_function_stack,
        "foreign_function_modes": foreign_function_modes,
        "default_device": default_device,
    }
