"""Fixes for calls that ask for a tensor's value, as templates for the user's own names."""

from __future__ import annotations

from types import MappingProxyType

__all__ = [
    "ADDRESS",
    "ARRAY",
    "BUFFER",
    "BUILTINS",
    "DRAWN_ARRAY",
    "FUNCTIONS",
    "GENERIC",
    "INDEX",
    "LOG",
    "OR_OUTSIDE",
    "SHOWS",
    "TABLE",
]

BINS = "weights stand in place of the ones, and their dtype is that of the zeros"
OR_OUTSIDE = "or return the value in `metrics` and decide outside of the step"
WITHOUT_IF = (
    "leave out the `if`: what follows then runs at each call, and keeps what it does not apply to, "
    "`torch.where(mask, new, old)`; a mask that is False everywhere masks nothing"
)
GENERIC = f"`torch.where(cond, a, b)`; {OR_OUTSIDE}"
ADDRESS = (  # Triton asks for addresses when it launches a kernel.
    "leave addresses to kernels: launch one of Triton's in an op, `@torch.library.triton_op(name, mutates_args=())`, "
    "as `torch.library.wrap_triton(kernel)[grid](...)`, and one of any other kind in a `torch.library.custom_op`"
)
SHOWS = "fcg.debug_print"
LOG = "`fcg.debug_print('{{}}', {x})` prints at each call; `step.eager(...)` runs once with real numbers"


def _table(text: str) -> MappingProxyType[str, str]:
    rows = (line.strip().split(" | ", 1) for line in text.strip().splitlines())
    return MappingProxyType({name: fix for names, fix in rows for name in names.split()})


# {x} is the tensor that the function works on, {y} its next argument, {args} all arguments, {name} the function.
BUILTINS = _table("""
    bool | keep `{x}` a tensor and select with it, `torch.where({x}, a, b)`; ELSE
    float complex | use `{x}` itself, a 0-dim tensor computes like a number; or return it in `metrics`
    int | use `{x}` itself; as an index of a tensor `table[{x}]`, as a size a static argument
    range | loop a fixed number of times and mask, `torch.where(i < {x}, new, old)`; or make `{x}` a static argument
    sorted | write `torch.sort({x}).values`
    any all | write `torch.stack(list({x})).{name}()`, a tensor, and select with `torch.where`
    print str repr format | LOG
""".replace("ELSE", OR_OUTSIDE).replace("LOG", LOG))  # fmt: skip
FUNCTIONS = _table("""
    item | use `{x}` itself, a 0-dim tensor computes like a number; or return it in `metrics`
    tolist | stay with torch ops on `{x}`; for parts of such sizes, compute each on all rows and mask; ELSE
    numpy __array__ | stay with torch ops on `{x}`; or return it in `metrics` and convert it outside of the step
    cpu to | leave `{x}` on its device; or return it in `metrics` and move it outside of the step
    nonzero argwhere | its length depends on values: keep the mask of fixed shape, `torch.where({x} != 0, values, 0)`
    where | its length depends on values: keep the mask of fixed shape, `torch.where({x}, values, 0)`
    unique | its length depends on values: sort and mark the repeats, `s = torch.sort({x}).values; s[1:] == s[:-1]`
    unique_consecutive | its length depends on values: mark the repeats instead, `{x}[1:] == {x}[:-1]`
    masked_select | `torch.where({y}, {x}, 0)` keeps the shape
    lstsq | write `torch.linalg.pinv({x}) @ {y}`: its residuals depend on the rank, so their shape does, too
    repeat_interleave | give the total length as a number, `torch.repeat_interleave({args}, output_size=n)`
    index_put index_put_ | `torch.where(mask, new, {x})` keeps the shape
    one_hot | give the number of classes, `torch.nn.functional.one_hot({x}, num_classes=n)`
    histc | give the range, `torch.histc({x}, bins=n, min=a, max=b)`
    debug info warning error critical exception | LOG
    copy dumps dump save | `{x}.clone()` copies it; to save it, return it in `metrics`
    data_ptr | ADDRESS
    bincount | with `n` bins, `torch.zeros(n, dtype={x}.dtype).scatter_add(0, {x}, torch.ones_like({x}))`; BINS
    equal | `({x} == {y}).all()` stays a tensor; select with `torch.where`, or return it in `metrics`
    allclose | `torch.isclose({x}, {y}).all()` stays a tensor; select with `torch.where`, or return it in `metrics`
    pack_padded_sequence pack_sequence | PACKED
    is_nonzero | `{x} != 0` stays a tensor; ELSE
    tensor as_tensor array asarray | use the tensor `{x}` itself; `{x}.clone()` copies it
    full | a tensor as the value is read on the host: write `{y}.expand(shape)`; a size comes from `.shape`
    arange zeros ones empty rand randn linspace eye new_zeros new_ones new_empty | SIZE
    view reshape expand repeat tile narrow split tensor_split chunk unflatten | SIZE
""".replace("BINS", BINS).replace("ELSE", OR_OUTSIDE).replace("LOG", LOG).replace("ADDRESS", ADDRESS).replace(
    "SIZE",
    "shapes are fixed at capture: take the size from `.shape` or a static argument, and mask with `torch.where`",
).replace(
    "PACKED",
    "run the layer on the padded sequences: an output depends on earlier steps alone; the last one of each is "
    "`out[torch.arange(len(lengths)), lengths - 1]`, and a mask, `torch.arange(out.shape[1]) < lengths[:, None]`, "
    "tells real steps from padding",
))  # fmt: skip

INDEX = "index with integer tensors of at least one dimension, `x[i[None]][0]`; for a mask, `torch.where(mask, x, 0)`"
# {x} is an array of numpy or a list of numbers, {name} its attribute. As a tensor, the line may stay as it is.
TABLE = (
    "make it a tensor where it is made, `{x} = torch.tensor({x})`, and declare it, `constants={x}`; or look the value "
    "up outside of the step and pass it as an input"
)
BUFFER = (
    "make it a buffer of the module where it is made, `self.register_buffer('{name}', torch.tensor({name}))`; or look "
    "the value up outside of the step and pass it as an input"
)

# Fixes for arithmetic between a numpy array and a tensor; ARRAY stands for the user's expression.
ARRAY = (
    "`ARRAY` is an array of numpy, which computes on the host: pass it as an input, or declare "
    "`torch.tensor(ARRAY)`, a copy, in `constants=`"
)
DRAWN_ARRAY = (
    "`ARRAY` is drawn by numpy, once and on the host: draw it from a key in the state, "
    "`fcg.random.uniform(key, shape)`, `normal`, ..., or pass it as an input"
)
