"""``from_module``: turns a module's forward into a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import tree as pytree
from ..ambient.running import name_of, own_work, running
from ..ambient.setting import in_a_backward
from ..errors import LayoutError
from ..manual import Documented
from ..messages.tracebacks import entry
from ..random.arguments import validate_key
from ..state.aliases import refuse_aliases
from ..state.arena import BufferSpec
from ..tensors.aten import is_batched, unwrapped
from .attributes import (
    OPS,
    Held,
    changed,
    copying,
    held,
    memory_of,
    refuse_changed,
    refuse_exchanged,
    refuse_unmade,
    walked,
)
from .call import Effects, Place, function_of, title
from .originals import Original, fixed_tensors
from .refusals import made_by_hooks, refuse_impure
from .remembered import only_remembers
from .storage import storage_of

__all__ = ["Apply", "from_module"]


@entry("apply, params, buffers = fcg.from_module(model)")
def from_module(
    module: nn.Module, *, cuts: Iterable[str] = ()
) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Turn a module's forward into a pure function and copy out its tensors.

    Every random op in the module, whether in ``nn.Dropout``, attention, RNNs or your own code, draws from the ``key``
    of the call, with a separate stream for each submodule and each draw in it, so that adding a layer does not change
    the masks of the others. Attention with dropout is one kernel on a GPU in half precision (heads of 16, 32, 64 or 128
    features, a multiple of 8 keys); elsewhere it holds all weights. RNNs run one time step at a time, without cuDNN
    and oneDNN. Writes to buffers, such as BatchNorm's running statistics, are returned instead of applied. The module
    itself is copied: later changes to it have no effect. A change of its mode, or of the values of its tensors, is
    ignored; after any other, the next call raises, even a replay. A replay compares four submodules of a module with
    more than 16, in turn, so it notices a change within a quarter as many calls as there are submodules.

    Parameters that do not require gradients become buffers: they are not trained. The mode is an argument of the call,
    ``train=True`` by default, whatever the mode of ``module``; but if ``module`` is in training mode and a submodule in
    evaluation mode, that submodule stays in evaluation mode.

    Args:
      module: Any module without hooks on its backward, wrappers, or lazy, sparse and meta tensors. Hooks on the forward
        are a part of it.
      cuts: Names of submodules, ``("h.3", "h.6")``: in a loss of a pipeline, a stage begins with what each is called
        with, as :meth:`functional_cg.sharding.Pipeline.cut` would begin it. Elsewhere they change nothing.
    Returns:
      (apply, params, buffers): an :class:`Apply`, and copies of the tensors under the module's own names; a tied
      tensor goes by the first of its names.
    Raises:
      AttributeError: If ``cuts`` names no submodule.
      AliasError: If two parameters share memory without being the same object (``b.data = a.data``).
      TypeError, SideEffectError, HostSyncError, LayoutError, ForeignTensorError: For what cannot be made pure, by name.

    Example:
      >>> import torch, functional_cg as fcg
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
      >>> apply, params, buffers = fcg.from_module(model)
      >>> sorted(params)
      ['0.bias', '0.weight', '1.bias', '1.weight']
      >>> out, new_buffers = apply(params, buffers, torch.randn(4, 2), key=fcg.random.key(0))
      >>> out.shape, new_buffers["1.num_batches_tracked"], buffers["1.num_batches_tracked"]
      (torch.Size([4, 3]), tensor(1), tensor(0))
      >>> model.load_state_dict(apply.state_dict(params, new_buffers))
      <All keys matched successfully>
    """
    if not isinstance(module, nn.Module):
        named = f"`{module.__name__}`, a class" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"from_module: expected a torch.nn.Module, got {named}.\n"
            f"To fix: make one, `fcg.from_module({getattr(module, '__name__', 'Model')}(...))`."
        )
    refuse_impure(module)
    at = frozenset([cuts] if isinstance(cuts, str) else cuts)
    for name in sorted(at):
        module.get_submodule(name)
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = dict(module.named_buffers())
    buffers |= {name: p for name, p in module.named_parameters() if not p.requires_grad}
    flat, treedef = pytree.flatten(params | buffers)
    refuse_aliases(treedef.paths(), flat, "params", type(module).__name__)
    made, ops = made_by_hooks(module), _ops_of(module)
    template = _template(module, ops, made.values())
    apply = Apply(
        template,
        frozenset(params),
        frozenset(_frozen(module)),
        Original(module),
        ops,
        frozenset(made),
        fixed_tensors(template),
        at,
    )
    return apply, _owned(params), _owned(buffers)


@dataclass(frozen=True, eq=False, repr=False)
class Apply(metaclass=Documented):
    """A module's forward as a pure function: ``apply(params, buffers, *args, ...) -> (out, new_buffers)``."""

    _template: nn.Module
    _trained: frozenset[str]
    _frozen: frozenset[str]
    _original: Original
    _ops: dict[int, Any]
    _made: frozenset[str]
    _fixed: dict[str, Tensor]
    _cuts: frozenset[str] = frozenset()
    _method: str = ""

    def method(self, name: str) -> Apply:
        """Return a pure function like this one that calls another method of the module than its forward.

        Args:
          name: Name of the method, ``"sample"``, or of one of a submodule, ``"decoder.sample"``; of a submodule alone,
            its forward.
        Raises:
          AttributeError: If there is none.
          TypeError: If it cannot be called.

        Example:
          >>> import torch, functional_cg as fcg
          >>> class Coin(torch.nn.Module):
          ...     def __init__(self):
          ...         super().__init__()
          ...         self.logit = torch.nn.Parameter(torch.zeros(()))
          ...     def forward(self, x):
          ...         return torch.nn.functional.logsigmoid(x * self.logit)
          ...     def sample(self, n):
          ...         return torch.bernoulli(self.logit.sigmoid().expand(n))
          >>> apply, params, buffers = fcg.from_module(Coin())
          >>> sample = apply.method("sample")
          >>> sample
          <apply of Coin.sample>
          >>> draws, _ = sample(params, buffers, 1000, key=fcg.random.key(0))
          >>> bool(400 < draws.sum() < 600)
          True
        """
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"apply.method: expected the name of a method, got {name!r}.\n"
                f"To fix: `apply.method({getattr(name, '__name__', 'encode')!r})`."
            )
        kind = type(self._template).__name__
        try:
            found = function_of(self._template, name)
        except AttributeError as error:
            raise AttributeError(f"apply.method: `{kind}` has no method `{name}`: {error}") from None
        if not callable(found):
            raise TypeError(f"apply.method: `{kind}.{name}` is no method, but a {type(found).__name__}")
        return replace(self, _method=name)

    @entry("out, new_buffers = apply(params, buffers, x)")
    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        /,
        *args: Any,
        key: Tensor | None = None,
        train: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the forward on a private copy of the module with the given tensors.

        Args:
          params: The trained tensors by name, in any floating dtype.
          buffers: The other tensors by name; never written. Each call copies them; a captured step copies only those
            that the forward writes.
          args: Arguments of the forward.
          key: i64[2], the key that random ops draw from; needed only if one runs. Under ``torch.func.vmap``, all
            examples share one key: with ``randomness="different"``, each still draws different numbers.
          train: Whether the module is in training mode.
          kwargs: Arguments of the forward.
        Returns:
          (out, new_buffers): the result of the forward, and the buffers after it. As in PyTorch, what
          ``torch.utils.checkpoint`` runs again in the backward writes these buffers, in place, a second time.
        Raises:
          ImplicitRandomnessError: If an op draws and ``key`` is None, or if a key cannot replace it.
          TypeError: If ``params`` or ``buffers`` is not a mapping, or ``key`` is a batch of keys.
          LayoutError: If names or shapes differ from the module's.
          ReadOnlyError: If the forward writes a parameter, or swaps the memory of a tensor.
          SideEffectError: If it writes an attribute of the module, or if a buffer becomes None or a tensor.
          BakedValueError: If the module changed after ``from_module`` copied it: frozen, hooked, or an attribute set.
            From a captured step, also if a buffer that the forward reads on the host holds another value than at the
            first call; reading one there is fine as long as the step never changes it.
          CaptureError: If it calls ``torch.utils.checkpoint`` with ``use_reentrant=True``, or of what draws random
            numbers in no submodule of its own, or assigns a buffer; ``remat`` around ``apply`` is fine.
        """
        self._original.check()
        params, buffers = self._by_name(params, buffers)
        if (work := running().work) is not None:
            work.buffers += map(unwrapped, buffers.values())
            work.fixed |= {id(tensor): (name, tensor) for name, tensor in self._fixed.items()}
        self._refuse_key(key)
        name = name_of(self._original, type(self._template).__name__)
        part = self._method.rpartition(".")[0]
        with own_work(f"{name}.{part}" if part else name):
            return self._run(name, params, buffers, args, kwargs, key, train=train)

    def _run(
        self,
        name: str,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Tensor | None,
        *,
        train: bool,
    ) -> tuple[Any, dict[str, Tensor]]:
        # Copy all of them; a captured step keeps only the copies that are written. Copying at the first write instead,
        # behind autograd's back, would be invisible to gradients, since autograd saves the tensors the forward uses.
        copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        # Aliases, so that `.data = ...` in the forward does not reach the caller's tensor objects.
        trained = {name: _alias(param) for name, param in params.items()}
        # To be compared after the forward; detached buffers keep their memory, so that no other can look like it.
        given = {name: buffer.detach() for name, buffer in copies.items()}
        memory = {name: memory_of(one) for name, one in trained.items()}
        module = self._copy({**trained, **copies}, train=train)

        def contents() -> Held:
            return {path: one for path, one in held(module).items() if path not in self._made}

        called, place = title(module, self._method), Place(module, self._original, name, self._cuts)
        empty = {path: one for path, one in copies.items() if not one.numel()}
        effects, before = Effects(called, key, place, params, self._fixed, empty), contents()
        out = effects.run(function_of(module, self._method), args, kwargs)
        refuse_unmade(called, module, self._made)
        copied, tensors = partial(self._copy, train=train), {**params, **buffers, **self._fixed}
        if changed(before, after := contents()) and not only_remembers(
            copied, self._method, tensors, args, kwargs, before, after
        ):
            refuse_changed(called, before, after)
        place.end(module, called, partial(Effects, called, key, params=params))
        refuse_exchanged(type(module).__name__, "params", memory, trained)
        memory = {name: memory_of(one) for name, one in given.items()}
        refuse_exchanged(type(module).__name__, "buffers", memory, copies)
        new = {name: attrgetter(name)(module) for name in buffers}
        kept = {
            name
            for name in buffers
            if new[name] is copies[name] and storage_of(new[name]) not in effects.written
        }
        values = {name: buffers[name] if name in kept else new[name].detach() for name in buffers}
        work = running().work
        if work is not None and not in_a_backward():  # there `remat` recomputes only for the gradients
            written = [name for name in buffers if name not in kept]
            parts = dict.fromkeys(name.rpartition(".")[0] for name in written)
            texts = tuple(f"`{path}` ({type(module.get_submodule(path)).__name__})" for path in parts)
            by_mode = module.training and (effects.drops or bool(written))
            new_values = [unwrapped(values[name]) for name in written]
            work.applied.append((self._original, type(module).__name__, by_mode, texts, new_values))
        return out, values

    def state_dict(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
        """Build a dict for ``model.load_state_dict``, with all names of the module's own ``state_dict``.

        Tied tensors appear under each of their names; non-persistent buffers are omitted. Also accepts parts of a
        state, which are not dicts: ``apply.state_dict(state.params, state.buffers)``. Alternatively,
        ``model.load_state_dict({**params, **buffers}, strict=False)`` loads the same values.
        """
        params, buffers = self._by_name(params, buffers)
        values = {id(tensor): (params | buffers)[name] for name, tensor in _tensors(self._template)}
        found: dict[str, Any] = self._template.state_dict(keep_vars=True)  # with the versions of its modules
        for name, value in found.items():
            found[name] = values.get(id(value), value)
        return found

    def __repr__(self) -> str:
        return f"<apply of {title(self._template, self._method)}>"

    def _copy(self, values: Mapping[str, Tensor], *, train: bool) -> nn.Module:
        """Make a private module for one call: nothing the forward does to it outlives the call."""
        memo = self._ops | {id(tensor): values[name] for name, tensor in _tensors(self._template)}
        memo |= {id(tensor): values.get(path, tensor) for path, tensor in self._fixed.items()}
        module = _copied(self._template, memo).train(train)
        for path in self._frozen if train else ():
            module.get_submodule(path).eval()
        return module

    def _by_name(self, params: Any, buffers: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        name = type(self._template).__name__
        for root, tree in (("params", params), ("buffers", buffers)):
            if not hasattr(tree, "keys"):
                got = BufferSpec.of(tree) if isinstance(tree, Tensor) else type(tree).__name__
                raise TypeError(
                    f"`{name}`: expected `{root}` as a mapping of names to tensors, got {got}.\n"
                    "To fix: `out, new_buffers = apply(params, buffers, x)`, with all that `from_module` returned; "
                    "`buffers` is `{}` where the module has none."
                )
        params, buffers = dict(params), dict(buffers)
        self._refuse_unlike(params, buffers)
        return params, buffers

    def _refuse_key(self, key: Tensor | None) -> None:
        if key is None:
            return
        validate_key(key)  # what the module draws from it is noted where it draws
        if is_batched(key):
            raise TypeError(
                f"`{type(self._template).__name__}`: expected `key` i64[2], got a batch of keys under `vmap`: the ops "
                "inside of a module draw for the whole batch at once.\n"
                'To fix: pass one key, `torch.func.vmap(f, in_dims=(0, None), randomness="different")(x, key)`: each '
                "example draws numbers of its own; or draw from the keys with `fcg.random` outside of the module."
            )

    def _refuse_unlike(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        known = dict(_tensors(self._template))
        rows = []
        for root, tree, names in (
            ("params", params, self._trained),
            ("buffers", buffers, known.keys() - self._trained),
        ):
            for name in sorted(names | tree.keys()):
                expected = f"a tensor {list(known[name].shape)}" if name in names else "nothing"
                tensor = tree.get(name)
                got = f"{BufferSpec.of(tensor) if isinstance(tensor, Tensor) else tensor}"
                if not isinstance(tensor, Tensor) or name not in names or tensor.shape != known[name].shape:
                    rows.append(f"{root}[{name!r}]  expected {expected}   got {got}")
        if rows:
            raise LayoutError.of(
                type(self._template).__name__,
                "is applied to tensors that are not its own.",
                rows=rows,
                why="Both are what `from_module` returned for this module, or what became of it.",
                fix="`out, new_buffers = apply(params, buffers, x)`, with these names and shapes, params first.",
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name; a tied tensor goes by the first of its names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _frozen(module: nn.Module) -> Iterator[str]:
    """Yield paths of submodules in evaluation mode inside a module in training mode."""
    return (path for path, part in module.named_modules() if module.training and not part.training)


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _template(module: nn.Module, ops: Mapping[int, Any], made: Iterable[Tensor]) -> nn.Module:
    """Copy the module with meta tensors, tied as before: a tensor that a call fails to replace raises when used."""
    with torch.inference_mode(False), torch.no_grad():
        tensors = [*(tensor for _, tensor in _tensors(module)), *made]
        memo = {**ops, **{id(tensor): _on_meta(tensor) for tensor in tensors}}
        try:
            return _copied(module, memo)
        except Exception as error:
            raise TypeError(
                f"from_module: {type(module).__name__} cannot be copied, {type(error).__name__}: {error}\n"
                "To fix: keep what cannot be copied (files, locks, generators) outside of the module."
            ) from error


def _ops_of(module: nn.Module) -> dict[int, Any]:
    return {id(value): value for _, value in walked(module) if isinstance(value, OPS)}


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    with copying():
        return copy.deepcopy(module, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _alias(param: Tensor) -> Tensor:
    """Alias a parameter within its autograd graph; leaves, readers and `torch.func` tensors protect themselves."""
    return cast(Tensor, torch.ops.aten.alias(param)) if storage_of(param) is not None else param
