"""Run a rank's row of a table: compute stages on micro-batches, send, receive, and add up gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ambient.running import running
from ..random import fold_in
from ..shards import transfers
from ..stages.evaluate import assigned
from ..stages.program import Instr, Program, Var, map_arguments
from ..tensors.op_table import row_of
from .actions import Action, Table
from .order import arrivals
from .stages import Rehearsal, Stage

__all__ = ["Worker"]


class Worker:
    """A rank at work on the actions of its row.

    Args:
      table: The table.
      rank: This rank's position on the stage axis.
      found: The loss, taken apart.
      params: The parameters that its stages read, by number.
      batch: Leaves of the batch [micro-batches, rows, ...].
      key: Key of the loss, or None.
      groups: Names of the process groups, by pair of ranks (from, to).
      dtype: Dtype in which sums are made; None for the values' own.
      device: Where all of this is.
    """

    def __init__(
        self,
        table: Table,
        rank: int,
        found: Rehearsal,
        params: Mapping[int, Tensor],
        batch: Sequence[Tensor],
        key: Tensor | None,
        groups: Mapping[tuple[int, ...], str],
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._table, self._rank, self._found = table, rank, found
        self._params = {found.params[i]: value for i, value in params.items()}
        self._batch = [leaf.unbind() for leaf in batch]  # a call for each leaf, not for each micro-batch
        self._key, self._groups = key, groups
        self._parts: dict[int, dict[Var, Tensor]] = {}  # of the batch, and keys, by micro-batch
        self._values: dict[tuple[int, int], dict[Var, Any]] = {}  # what a stage keeps for its backward
        self._boxes: dict[Action, list[Any]] = {}  # what was made to be handed on, or has arrived
        self._sent: dict[Action, list[tuple[Any, Any]]] = {}  # tokens, and what they send
        self._launched: set[Action] = set()
        self._token: Any = transfers.start(device) if table.edges else torch.empty(0)
        self._arrivals = arrivals(table, rank)
        self._dtype = dtype
        self._grads: dict[tuple[int, int], Any] = {}  # sums over micro-batches, by stage and parameter
        self._results: dict[int, Any] = {}  # the same, by position

    def work(self) -> tuple[dict[tuple[int, int], Tensor], dict[int, Tensor]]:
        """Do all actions of the row; return sums of gradients, by stage and parameter, and of results, by position."""
        acts: dict[str, Callable[[Action, Stage], None]] = {
            "F": self._forward, "B": self._backward, "I": self._inward, "W": self._weights,
            "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
        }  # fmt: skip
        for action in self._table.rows[self._rank]:
            acts[action.kind](action, self._found.stages[action.stage])
        for action in list(self._sent):
            self._end_send(action)
        grads = {key: running().tensor(one) for key, one in self._grads.items()}
        return grads, {position: running().tensor(one) for position, one in self._results.items()}

    def _forward(self, action: Action, stage: Stage) -> None:
        values = {**self._params, **self._part(action.microbatch)}
        values.update(zip(stage.inputs, self._arrived(action, "RECV_F"), strict=True))
        self._play(stage.forward, values, action)
        results = {position: values[result] for position, result in stage.results.items()}
        self._add(stage, "results", self._results, results)
        self._hand_on(Action(action.stage, "SEND_F", action.microbatch), stage, values, stage.outputs)
        if not self._table.forward_only:
            self._values[action.stage, action.microbatch] = values

    def _backward(self, action: Action, stage: Stage) -> None:
        self._inward(action, stage)
        self._weights(action, stage)

    def _inward(self, action: Action, stage: Stage) -> None:
        values = self._values[action.stage, action.microbatch]
        values.update(zip(stage.behind, self._arrived(action, "RECV_B"), strict=True))
        self._play(stage.inward, values, action)
        self._hand_on(Action(action.stage, "SEND_B", action.microbatch), stage, values, stage.ahead)

    def _weights(self, action: Action, stage: Stage) -> None:
        values = self._values.pop((action.stage, action.microbatch))
        self._play(stage.weights, values, action)
        grads = {(action.stage, number): values[grad] for number, grad in stage.grads.items()}
        self._add(stage, "gradients", self._grads, grads)

    def _play(self, part: Program, values: dict[Var, Any], action: Action) -> None:
        """Make the calls of a part on the values of a micro-batch; what is wanted of them is added to the values."""
        given = [var for var in part.inputs if var in values]

        def act(tensors: list[Tensor]) -> list[Tensor]:
            known = dict(zip(given, tensors, strict=True))
            for call in part.instrs:
                with running().as_before((call.site, call.backward, call.inner, call.origin)):
                    known.update(assigned(call.out, self._made_again(call, known)))
            return [known[var] for var in part.outputs]

        made = running().repeated(part, act, [values[var] for var in given], part.function)
        values.update(zip(part.outputs, made, strict=True))

    def _made_again(self, call: Instr, known: Mapping[Var, Tensor]) -> Any:
        surroundings = self._found.tape.tensors
        if row_of(call.op).lifts:  # a literal is another tensor each time, which may be written
            with _disable_current_modes():
                literal = surroundings[call.args[0]].clone()
            return call.op(literal)
        args, kwargs = map_arguments(lambda var: known[var] if var in known else surroundings[var], call)
        return call.op(*args, **kwargs)

    def _add(self, stage: Stage, kind: str, sums: dict[Any, Any], new: Mapping[Any, Any]) -> None:
        """Add what a stage computed of one micro-batch: all of it to sums, or the first of each."""
        old = [sums[key] for key in new if key in sums]

        def added(values: list[Tensor]) -> list[Tensor]:
            terms = (  # each is added before the next one is converted, which would take memory beside it
                value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value
                for value in values[len(old) :]
            )
            return [*map(torch.add, values, terms)] if old else [*terms]

        sums.update(
            zip(new, running().repeated((stage, kind, bool(old)), added, [*old, *new.values()]), strict=True)
        )

    def _part(self, microbatch: int) -> dict[Var, Tensor]:
        """Return the leaves of a micro-batch, and its key."""
        if microbatch not in self._parts:
            found = self._found
            part = {var: leaf[microbatch] for var, leaf in zip(found.batch, self._batch, strict=True)}
            if self._key is not None and found.key is not None:
                part[found.key] = fold_in(self._key, microbatch)
            self._parts[microbatch] = part
        return self._parts[microbatch]

    def _hand_on(self, send: Action, stage: Stage, values: Mapping[Var, Any], made: Sequence[Var]) -> None:
        """Keep what a computation made: to be sent, or where a stage of this rank finds it."""
        if not 0 <= send.other_end.stage < self._table.stages:
            return
        owners = self._table.owners
        box = send if owners[send.stage] != owners[send.other_end.stage] else send.other_end
        given = [values[var] for var in made]
        self._boxes[box] = running().repeated(
            (stage, send.kind, "packed"), lambda tensors: [one.contiguous() for one in tensors], given
        )

    def _arrived(self, action: Action, kind: Literal["RECV_F", "RECV_B"]) -> list[Any]:
        """Return what a computation gets from another stage."""
        receive = Action(action.stage, kind, action.microbatch)
        values = self._boxes.pop(receive, [])
        if receive in self._launched:
            values = running().repeated(
                (action.stage, kind, "arrived"), lambda tensors: [*map(transfers.wait, tensors)], values
            )
        for send in self._arrivals.get(action, ()):
            self._end_send(send)
        return values

    def _send(self, action: Action, stage: Stage) -> None:
        link, values = self._link(action), self._boxes.pop(action)

        def act(tensors: list[Tensor]) -> list[Tensor]:
            tokens = [tensors[0]]
            for value in tensors[1:]:
                tokens.append(transfers.send(value, tokens[-1], *link))
            return tokens[1:]

        tokens = running().repeated((stage, action.kind, link), act, [self._token, *values])
        self._token = tokens[-1] if tokens else self._token
        self._sent[action] = list(zip(tokens, values, strict=True))

    def _receive(self, action: Action, stage: Stage) -> None:
        like = [var.spec for var in (stage.inputs if action.kind == "RECV_F" else stage.behind)]
        link = self._link(action)

        def act(tensors: list[Tensor]) -> list[Tensor]:
            (token,), values = tensors, []
            for one in like:
                value, token = transfers.receive(token, one.shape, one.dtype, *link)
                values.append(value)
            return [*values, token]

        *values, self._token = running().repeated((stage, action.kind, link), act, [self._token])
        self._boxes[action] = values
        self._launched.add(action)

    def _link(self, action: Action) -> tuple[int, str]:
        """Return the other rank's position in the group of a transfer, and the group's name."""
        source, target = self._table.edge(action)
        other = target if action.sends else source
        return int(other > self._rank), self._groups[source, target]

    def _end_send(self, action: Action) -> None:
        if sent := self._sent.pop(action, None):
            given = [self._token, *(one for pair in sent for one in pair)]
            (self._token,) = running().repeated((action.stage, action.kind, "sent"), _ended, given)


def _ended(tensors: list[Tensor]) -> list[Tensor]:
    """Wait until values are sent, given a token, and of each value the token of its launch and itself."""
    token, *sent = tensors
    for launched, value in zip(sent[::2], sent[1::2], strict=True):
        token = transfers.end(launched, value, token)
    return [token]
