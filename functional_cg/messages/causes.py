"""Find what an exception in the user's function comes from, and suggest a fix in the user's own names.

The exception is Python's or torch's, and tells what was wrong with some object; the fix depends on what that object is
here: the pair that a module's function returns, a function that was not called, a name of another library.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors.words import words_of
from .code_reading import Site, operand, text_of
from .source import is_installed, raised_in

__all__ = ["fix_of", "takes", "wording"]

_OUR_FIX = re.compile(r"\nTo fix: (.*)$", re.DOTALL)
# Words of torch about tensors whose shapes do not go together.
_SHAPES = re.compile(
    r"reduction dim|broadcast|shapes? |sizes? |dimension|must match|expected input|channels|same number of|numel"
)
_METHODS = MappingProxyType(
    {
        "astype": "{x}.to(torch.float32)",
        "at": "torch.where(mask, value, {x})",
        "copy": "{x}.clone()",
        "block_until_ready": "{x}",
        "len": "len({x})",
        "append": "torch.cat([{x}, new])",
        "extend": "torch.cat([{x}, new])",
        "concat": "torch.cat([{x}, new])",
        "shuffle": "{x}[fcg.random.permutation(key, len({x}))]",
        "to_device": "{x}",
        "ravel": "{x}.flatten()",
    }
)


def fix_of(error: BaseException) -> str:
    """Return the fix for an exception from the user's function, in the user's names; "" if it is not known."""
    ours = _OUR_FIX.search(words_of(error))
    if ours is not None:  # the exception comes from this package, and says it
        return ours[1].rstrip(".")
    entries = [one for one in raised_in(error) if not is_installed(one.tb_frame.f_code.co_filename)]
    site = Site.of(entries[-1].tb_frame, entries[-1].tb_lasti) if entries else None
    for kinds, words, cause in _CAUSES if site is not None else ():
        if isinstance(error, kinds) and re.search(words, words_of(error), re.DOTALL):
            if fix := cause if isinstance(cause, str) else cause(site, error):
                return fix
    return _shapes(site, error)


def wording(text: str) -> str:
    """Return the first line of an exception's text, without the class that stands for tensors in a trace."""
    return (text.splitlines() or [""])[0].replace("FakeTensor", "Tensor")


def _missing_key(site: Site, error: KeyError) -> str:
    key = error.args[0] if error.args else None
    if isinstance(key, type) and issubclass(key, Tensor):
        return "choose by `isinstance(x, torch.Tensor)`: the tensors of a trace are of a class of their own"
    held = site.value(site.node.value) if isinstance(site.node, ast.Subscript) else None
    if not isinstance(held, Mapping):
        return ""
    name, read = text_of(site.node.value), text_of(site.node)
    if close := difflib.get_close_matches(str(key), [one for one in held if isinstance(one, str)], 1):
        return f"did you mean `{name}[{close[0]!r}]` by `{read}`?"
    keys = ", ".join(map(repr, held)) or "none"
    return f"`{name}` has the keys {keys}: read one of them, or pass `{read}`, too"


def _assigned(site: Site) -> tuple[list[ast.expr], ast.Call] | None:
    """Return targets and value of a call whose result the line unpacks."""
    match site.statement():
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call() as call):
            return targets, call
    return None


def _without_gradient(site: Site, error: BaseException) -> str:
    """Something is differentiated that autograd does not track: the leaves of a state do not ask for gradients."""
    match site.node:
        case ast.Call(func=ast.Attribute(attr="grad") | ast.Name(id="grad"), args=[out, *inputs]):
            if "differentiated" not in words_of(error):
                return (
                    "`loss, grads = fcg.value_and_grad(loss_fn)(state.params)`; or compute "
                    f"`{text_of(out)}` from tensors with `requires_grad_()`"
                )
            given = [text_of(one) for one in inputs[:1]]
            return f"`{(given or ['x'])[0]}.requires_grad_()` before `{text_of(out)}` is computed from it"
    return "in place of `backward()`, `loss, grads = fcg.value_and_grad(loss_fn)(state.params)`"


def _uncalled(site: Site, error: BaseException) -> str:
    """A function that ``value_and_grad`` made, unpacked without being called."""
    if (found := _assigned(site)) is None:
        return ""
    targets, call = found
    names = ", ".join(map(text_of, targets))
    made, given = text_of(call), call.args[0] if call.args else None
    if isinstance(given, ast.Call):  # the value in place of the function: its arguments go behind
        made = f"{text_of(call.func)}({text_of(given.func)})"
        args = [text_of(arg) for arg in given.args]
    else:
        function = site.value(given) if given is not None else None
        code = getattr(function, "__code__", None)
        args = ["state.params", *(code.co_varnames[1 : code.co_argcount] if code is not None else ())]
    return f"`{names} = {made}({', '.join(args)})`: what `{text_of(call.func)}` returns is a function, to be called"


def _three_of_aux(site: Site, error: BaseException) -> str:
    """Three targets for what ``value_and_grad(has_aux=True)`` returns."""
    found = _assigned(site)
    if found is None or "has_aux" not in text_of(found[1]):
        return ""
    names = [text_of(target) for target in found[0]]
    return f"`({', '.join(names[:-1])}), {names[-1]} = {text_of(found[1])}`: value and aux are one pair"


def _still_a_pair(site: Site, error: BaseException) -> str:
    """A tuple that was meant to be unpacked, such as the pair that a module's function returns."""
    for name, value in _values(site):
        if not isinstance(value, tuple | list) or not name.isidentifier():
            continue
        made = _made(site, name)
        names = [name, "new_buffers"] if len(value) == 2 and isinstance(value[1], Mapping) else []
        if made is not None and len(value) == 2:
            return f"it is a pair, unpack it: `{', '.join(names or [name, 'rest'])} = {made}`"
        if made is None and all(isinstance(one, Tensor) and one.ndim for one in value) and value:
            letters = ["x", "y"] if len(value) == 2 else [f"x{i}" for i in range(len(value))]
            return (
                f"`{name}` is a {type(value).__name__} of {len(value)} tensors, as a DataLoader makes it: unpack it in "
                f"the step, `{', '.join(letters)}{',' if len(value) == 1 else ''} = {name}`; or pass a dict of names"
            )
    return ""


def _made(site: Site, name: str) -> str | None:
    """Return the call whose result the function calls by a name, nearest before the line."""
    found = None
    for node in site.parents:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if target == name:
                first = site.frame.f_code.co_firstlineno
                if first <= node.lineno <= site.node.lineno:
                    found = text_of(call)
    return found


def _attribute(site: Site, error: AttributeError) -> str:
    """An attribute that a tensor does not have: the method of another library's array."""
    if not isinstance(error.obj, Tensor) or not error.name:
        return ""
    node = next((one for one in ast.walk(site.node) if isinstance(one, ast.Attribute)), None)
    x = operand(node.value) if node is not None and node.attr == error.name else "x"
    if error.name in _METHODS:
        return f"`{_METHODS[error.name].format(x=x)}`"
    close = difflib.get_close_matches(error.name, [one for one in dir(Tensor) if one[0] != "_"], 1)
    if close:
        return f"did you mean `{x}.{close[0]}`?"
    return f"a tensor has no `{error.name}`; functions of torch take it, `torch.name({x})`"


def _optimizer(site: Site, error: BaseException) -> str:
    """A method of an optimizer, called as one of torch is."""
    func = getattr(site.node, "func", None)
    owner = site.value(func.value) if isinstance(func, ast.Attribute) else None
    of_ours = type(owner).__module__.startswith("functional_cg.optim")
    return "`state = state.apply_gradients(grads)`" if of_ours else ""


def _schedule(site: Site, error: BaseException) -> str:
    """A schedule, computed with as if it were a number."""
    for one in ast.walk(site.node):
        if isinstance(one, ast.Name | ast.Attribute) and _derives(site.value(one), "Schedule"):
            name, owner = text_of(one), site.value(one.value) if isinstance(one, ast.Attribute) else None
            if isinstance(one, ast.Attribute) and _derives(owner, "GradientTransformation"):
                made = f"fcg.optim.inject_hyperparams({type(owner).__name__})({one.attr}=...)"
                return f"`{name}` is a schedule: `{made}` gives its value at each update"
            return f"`{name}` is a schedule: its value is `{name}(state.step)`"
    return ""


def _derives(value: Any, base: str) -> bool:
    """Whether a value is of a class of ``optim``, by its name, since messages import no optimizers."""
    kinds = type(value).__mro__
    return any(kind.__name__ == base and kind.__module__.startswith("functional_cg.optim") for kind in kinds)


def _frozen(site: Site, error: BaseException) -> str:
    """A field that is assigned in a frozen object which is no state, such as an optimizer."""
    for one in ast.walk(site.node):
        match one:
            case ast.Attribute(value=held, ctx=ast.Store()):
                owner = site.value(held)
                if owner is not None and not hasattr(type(owner), "replace"):
                    return (
                        f"`{text_of(held)}` is frozen: what changes from call to call is a tensor of the state, such "
                        "as `torch.tensor(0)`, which goes in and is returned"
                    )
    return ""


def _no_name(site: Site, error: NameError) -> str:
    if not error.name:
        return ""
    known = [*site.frame.f_locals, *site.frame.f_globals]
    if close := difflib.get_close_matches(error.name, known, 1, 0.8):
        return f"did you mean `{close[0]}` by `{error.name}`?"
    return f"define `{error.name}`, or pass it as an input"


def _no_gpu(site: Site, error: BaseException) -> str:
    if torch.cuda.is_available():
        return ""
    copied = "inputs are copied to the state's device, and torch sees no GPU here"
    match site.node:
        case ast.Call(keywords=given) if any(one.arg == "device" for one in given):
            return "create it where an input is, such as with `device=x.device`: torch sees no GPU here"
        case ast.Call(func=ast.Attribute(value=owner)):
            return f"write `{text_of(owner)}`: {copied}"
    return f"leave tensors where they are: {copied}"


# What an exception is, and words of it -> the fix, or what finds it in the user's line; the first that is found counts.
_CAUSES: tuple[
    tuple[type[Exception] | tuple[type[Exception], ...], str, str | Callable[[Any, Any], str]], ...
] = (
    (Exception, "does not require grad", _without_gradient),
    (
        Exception,
        "Creating a new Tensor subclass",
        "a step computes on plain tensors: write what the class does as functions of them",
    ),
    (KeyError, "", _missing_key),
    (TypeError, "function", _uncalled),
    (ValueError, "", _three_of_aux),
    ((TypeError, AttributeError), "tuple|list", _still_a_pair),
    (AttributeError, "", _attribute),
    (TypeError, "", _optimizer),
    (TypeError, "", _schedule),
    (FrozenInstanceError, "", _frozen),
    (NameError, "", _no_name),
    (Exception, "(TrainState|Handle)'", "pass the parameters, `state.params`"),
    (
        Exception,
        "(?=.*process group).*init",
        "`fcg.sharding.mean(x)` in place of `all_reduce`, of a state with `sharding=fcg.sharding.zero(mesh)`",
    ),
    ((RuntimeError, AssertionError), "cuda|CUDA", _no_gpu),
)


def _shapes(site: Site | None, error: BaseException) -> str:
    """Tensors of shapes that do not go together: what each is called here, and what the module takes."""
    if not isinstance(error, RuntimeError | ValueError | IndexError) or not _SHAPES.search(words_of(error)):
        return ""
    module = _module_in(error)
    if module is not None:
        path, part, given = module
        where = f"`{path}`, {part!r}," if path else f"{part!r}"
        made_by = [one.tb_frame.f_code.co_filename for one in raised_in(error)[-1:]]
        own = bool(made_by) and not is_installed(made_by[0])
        return f"{where} was given {_shown(given)}: {_fitting(part, given, own=own)}"
    tensors = {name: value for name, value in _values(site) if isinstance(value, Tensor)}
    shown = " and ".join(f"`{name}` is {_shown(value)}" for name, value in tensors.items())
    return f"make the shapes fit: {shown}" if shown else ""


def _shown(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"


def _fitting(part: nn.Module, given: Tensor, *, own: bool) -> str:
    """Return how a module and its input would fit: by another module if the user has made it, else by another input."""
    linear, convolution = isinstance(part, nn.Linear), isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if linear and own and given.ndim:
        return f"make it `nn.Linear({given.shape[-1]}, {part.out_features})`"
    if convolution and own and given.ndim > 1:
        return (
            f"make it `nn.{type(part).__name__}({given.shape[1]}, {part.out_channels}, {part.kernel_size})`"
        )
    if linear:
        return f"pass an input whose last dimension is {part.in_features}"
    if convolution:
        return f"pass an input of {part.in_channels} channels, [batch, channels, ...]"
    return "pass an input of the shape that it takes"


def _module_in(error: BaseException) -> tuple[str, nn.Module, Tensor] | None:
    """Return the innermost module of torch whose forward raised: its path in the outermost one, it, and its input."""
    methods = [
        one for one, _ in walk_tb(error.__traceback__) if isinstance(one.f_locals.get("self"), nn.Module)
    ]
    if not methods:
        return None
    outermost, part = (one.f_locals["self"] for one in (methods[0], methods[-1]))
    code, values = methods[-1].f_code, methods[-1].f_locals
    arguments = [values.get(name) for name in code.co_varnames[1 : code.co_argcount]]
    given = next((one for one in arguments if isinstance(one, Tensor)), None)
    path = next((path for path, one in outermost.named_modules() if one is part), "")
    return None if given is None or not type(part).__module__.startswith("torch.") else (path, part, given)


def _values(site: Site | None) -> Iterator[tuple[str, Any]]:
    """Yield the names, attributes and items of which an expression is made, with their values."""
    if site is None:
        return
    node = site.node
    while not isinstance(node, ast.stmt) and isinstance(site.up(node), ast.Call):
        node = site.up(node)
    inside: set[ast.AST] = set()  # what has been shown, or the part of it
    for one in ast.walk(node):
        named = isinstance(one, ast.Name | ast.Attribute | ast.Subscript)
        value = site.value(one) if named and one not in inside else None
        if one in inside or isinstance(value, Tensor | tuple | list):
            inside.update(ast.iter_child_nodes(one))
        if isinstance(value, Tensor | tuple | list):
            yield text_of(one), value


def takes(function: Callable[..., Any], name: str) -> str:
    """Return how a function is called: ``train_step(state, batch)``."""
    try:
        return f"{name}({', '.join(inspect.signature(function).parameters)})"
    except (TypeError, ValueError):  # a builtin without a signature
        return f"{name}(...)"
