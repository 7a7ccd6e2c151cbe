"""What templates hand on to each other is one list in the source of a plan, rather than a name for each value.

A stage's forward makes dozens of values that its backward reads, for each micro-batch. To name each of them where it is
made, handed on and dropped takes a compiler of Python longer than all else that a plan is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .program import Instr, Var
from .template import Template

__all__ = ["Together"]


class Together:
    """The values of a head that are handed on together, and the order in which templates take and return values.

    Places of a template's results that the same calls read, all of them templates, are a group, as seen in the middle
    one of its calls. The template returns groups last, and those that read them take them last. A call whose results
    are read so has a list for each group; any other one has their names, in the same order.

    Args:
      head: The calls.
      kept: Variables that are read after it.
      fixed: Variables that are bound to buffers: a result that is one of them is not bound again.
    """

    def __init__(self, head: Sequence[Instr], kept: Collection[Var], fixed: Collection[Var]) -> None:
        calls: dict[Template, list[Instr]] = {}
        readers: dict[Var, list[Instr]] = {}
        for instr in head:
            if isinstance(instr.op, Template):
                calls.setdefault(instr.op, []).append(instr)
            for var in instr.inputs():
                readers.setdefault(var, []).append(instr)
        kept, self._fixed = {*kept, *fixed}, fixed
        self._made: dict[Template, list[Sequence[int]]] = {template: [] for template in calls}
        self._given: dict[Template, list[Sequence[int]]] = {template: [] for template in calls}
        self._lists: dict[Var, Sequence[Var]] = {}
        taken: dict[Template, set[int]] = {template: set() for template in calls}
        for template, made in calls.items():
            for places in _groups(made[len(made) // 2], readers):
                some = [made[len(made) // 2].out[place] for place in places]
                ends = [(end.op, [end.args[0].index(var) for var in some]) for end in readers[some[0]]]
                others = {of for of, given in ends if taken[of].isdisjoint(given)}
                if len(others) < len(ends):
                    continue
                self._made[template].append(places)
                for of, given in ends:
                    taken[of].update(given)
                    self._given[of].append(given)
                for call in made:
                    self._join([call.out[place] for place in places], ends, readers, kept)

    def _join(
        self,
        some: Sequence[Var],
        ends: Sequence[tuple[Template, Sequence[int]]],
        readers: Mapping[Var, Sequence[Instr]],
        kept: Collection[Var],
    ) -> None:
        """Make a list of some results of a call, if they are read where a group's are, and nowhere else."""
        known = readers.get(some[0], ())
        if [end.op for end in known] != [of for of, _ in ends]:
            return
        read = all(
            [end.args[0][place] for place in given] == some
            for end, (_, given) in zip(known, ends, strict=True)
        )
        if read and all(len(readers[var]) == len(ends) and var not in kept for var in some):
            self._lists |= dict.fromkeys(some, some)

    def takes(self, template: Template) -> list[Var]:
        """Return what a template is given, in the order of its function."""
        return _in_order(template.given, self._given[template])

    def returns(self, template: Template) -> list[Var]:
        """Return the results of a template, in the order of its function."""
        return _in_order(template.results, self._made[template])

    def name(self, var: Var) -> str:
        """Return the name that stands for a variable: its own, or that of its list."""
        return _name(self._lists[var][0]) if var in self._lists else repr(var)

    def given(self, instr: Instr) -> str:
        """Return the source of the list that a call of a template takes."""
        return f"given = [{', '.join(self._texts(instr.args[0], self._given[instr.op]))}]"

    def made(self, instr: Instr, call: str) -> list[str]:
        """Return the source that takes the results of a call of a template apart."""
        out, groups = instr.out, self._made[instr.op]
        starred = [places for places in groups if out[places[0]] in self._lists]
        if len(starred) < 2:
            return [f"[{', '.join(self._texts(out, groups, self._fixed))}] = {call}"]
        order, start, lines = _in_order(out, groups), 0, [f"made = {call}"]
        for places in starred:
            end = order.index(out[places[0]])
            lines += self._taken(order, start, end)
            start = end + len(places)
            lines.append(f"{_name(order[end])} = made[{end}:{start}]")
        return [*lines, *self._taken(order, start, len(order)), "del made"]

    def _taken(self, order: Sequence[Var], start: int, end: int) -> list[str]:
        names = ", ".join(self._texts(order[start:end], (), self._fixed))
        return [f"[{names}] = made[{start}:{end}]"] if names else []

    def _texts(
        self, variables: Sequence[Var], groups: Sequence[Sequence[int]], skipped: Collection[Var] = ()
    ) -> list[str]:
        """Return the names of variables in the order of a function, with a star and its name for a list."""
        texts = list[str]()
        for places in (_alone(len(variables), groups), *groups):
            some = [variables[place] for place in places]
            if groups and some and some[0] in self._lists:
                texts.append(f"*{_name(some[0])}")
            else:
                texts += ["_" if var in skipped else repr(var) for var in some]
        return texts


def _groups(call: Instr, readers: Mapping[Var, Sequence[Instr]]) -> list[Sequence[int]]:
    """Return the places of results that the same calls read, all of them of templates."""
    found: dict[tuple[Instr, ...], list[int]] = {}
    for place, var in enumerate(call.out):
        ends = tuple(readers.get(var, ()))
        if ends:
            found.setdefault(ends, []).append(place)
    return [
        places
        for ends, places in found.items()
        if len(places) > 1 and all(isinstance(one.op, Template) for one in ends)
    ]


def _alone(count: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the places that are in no group."""
    return sorted({*range(count)}.difference(*groups)) if groups else range(count)


def _in_order(variables: Sequence[Var], groups: Sequence[Sequence[int]]) -> list[Var]:
    """Return variables with those of groups last."""
    places = (_alone(len(variables), groups), *groups)
    return [variables[place] for one in places for place in one]


def _name(first: Var) -> str:
    """Return the name of the list that begins with a variable."""
    return f"h{first.index}"
