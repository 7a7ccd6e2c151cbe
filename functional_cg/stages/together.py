"""What templates hand on to each other is one list in the source of a plan, rather than a name for each value.

A stage's forward makes dozens of values that its backward reads, for each micro-batch. To name each of them where it is
made, handed on and dropped takes a compiler of Python longer than all else that a plan is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

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
            for places in _groups(made[len(made) // 2], readers, kept):
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
        return [template.given[place] for place in _in_order(len(template.given), self._given[template])]

    def returns(self, template: Template) -> list[Var]:
        """Return the results of a template, in the order of its function."""
        return [template.results[place] for place in _in_order(len(template.results), self._made[template])]

    def given(self, instr: Instr) -> str:
        """Return the source of what a call of a template is given."""
        given, order = instr.args[0], _in_order(len(instr.args[0]), self._given[instr.op])
        return f"[{', '.join(self._texts([given[place] for place in order], '*'))}]"

    def results(self, instr: Instr, call: str) -> list[str]:
        """Return the source of a call of a template that takes its results apart."""
        out, groups = instr.out, self._made[instr.op]
        order = [out[place] for place in _in_order(len(out), groups)]
        lists = [some for places in groups if (some := self._lists.get(out[places[0]])) is not None]
        if len(lists) < 2:
            return [f"[{', '.join(self._texts(order, '*', self._fixed))}] = {call}"]
        lines, start = [f"made = {call}"], 0
        for some in lists:
            end = order.index(some[0])
            lines += self._taken(order, start, end)
            start = end + len(some)
            lines.append(f"{_name(some)} = made[{end}:{start}]")
        return [*lines, *self._taken(order, start, len(order)), "del made"]

    def _taken(self, order: Sequence[Var], start: int, end: int) -> list[str]:
        names = ", ".join(self._texts(order[start:end], skipped=self._fixed))
        return [f"[{names}] = made[{start}:{end}]"] if names else []

    def dropped(self, variables: Iterable[Var]) -> list[str]:
        """Return the source that drops variables."""
        names = ", ".join(self._texts(variables))
        return [f"del {names}"] if names else []

    def _texts(self, variables: Iterable[Var], star: str = "", skipped: Collection[Var] = ()) -> list[str]:
        """Return the names of variables; in place of the first one of a list, that of the list, and no others."""
        texts, seen = list[str](), set[int]()
        for var in variables:
            if (some := self._lists.get(var)) is None:
                texts.append("_" if var in skipped else repr(var))
            elif id(some) not in seen:
                seen.add(id(some))
                texts.append(star + _name(some))
        return texts


def _groups(
    call: Instr, readers: Mapping[Var, Sequence[Instr]], kept: Collection[Var]
) -> list[Sequence[int]]:
    """Return the places of results that the same calls read, as templates do, and each once."""
    found: dict[tuple[Instr, ...], list[int]] = {}
    for place, var in enumerate(call.out):
        ends = tuple(readers.get(var, ()))
        if ends and var not in kept and len({*ends}) == len(ends):
            found.setdefault(ends, []).append(place)
    return [
        places
        for ends, places in found.items()
        if len(places) > 1 and all(isinstance(one.op, Template) for one in ends)
    ]


def _in_order(count: int, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return places with those of groups last."""
    behind = [place for places in groups for place in places]
    return [*sorted({*range(count)}.difference(behind)), *behind]


def _name(some: Sequence[Var]) -> str:
    return f"h{some[0].index}"
