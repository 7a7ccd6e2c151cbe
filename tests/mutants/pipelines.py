"""Mutants of pipelines."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["PIPELINES"]

BITS, BLOCKS, TABLES, MISTAKES, COMPILED, JUDGES, EVALUATION, TEMPLATES, GROUPS, TRANSFERS = (
    f"tests/pipelines/test_{name}.py::"
    for name in (
        "bitwise", "blocks", "tables", "mistakes", "compiled", "other_judges", "evaluation", "templates",
        "groups", "transfers",
    )
)  # fmt: skip
SEVERAL = "it takes several GPUs, or none"
RESERVE = "tests/test_reserve.py::"

PIPELINES = (
    Mutant(
        "N110",
        "what is sent is free once it is launched, and not once it has arrived",
        (
            (
                "        token = transfers.end(launched, value, token)\n",
                "        token = transfers.end(launched, launched, token)\n",
            ),
        ),
        (f"{BITS}test_what_is_sent_keeps_its_memory_until_it_is_sent",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N110 arrival",
        "what another rank sends is read before it has arrived",
        (("lambda tensors: [*map(transfers.wait, tensors)]", "lambda tensors: tensors"),),
        (
            f"{JUDGES}test_nothing_is_read_before_it_arrives_or_after_its_memory_is_free",
            f"{EVALUATION}test_nothing_is_read_before_it_arrives_or_after_its_memory_is_free[1f1b]",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N110 forward",
        "an evaluation keeps all that it sends until it ends",
        (("if table.forward_only and later else []", "if False else []"),),
        (
            f"{EVALUATION}test_an_evaluation_frees_what_a_stage_has_computed[1f1b-cuts0]",
            f"{TABLES}test_the_forwards_of_a_table_are_a_table[1f1b]",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N111",
        "the gradients of weights of the last micro-batch are left out",
        (
            (
                '        self._add(stage, "gradients", self._grads, grads)\n',
                (
                    "        last = action.microbatch == self._table.microbatches - 1\n"
                    '        if not (last and action.kind == "W"):\n'
                    '            self._add(stage, "gradients", self._grads, grads)\n'
                ),
            ),
        ),
        (f"{BITS}test_gradients_of_weights_may_come_late[1]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112",
        "late gradients of weights read the data of another micro-batch",
        (
            (
                "        values = self._values.pop((action.stage, action.microbatch))\n",
                (
                    "        values = self._values.pop((action.stage, action.microbatch))\n"
                    '        other = (action.microbatch + (action.kind == "W")) % self._table.microbatches\n'
                    "        values.update(self._part(other))\n"
                ),
            ),
        ),
        (f"{BITS}test_gradients_of_weights_may_come_late[1]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 copies",
        "the calls that a trace copies for a micro-batch read the data of the first one",
        (
            (
                "names: dict[Var, Any] = dict(zip(self.given, given, strict=True))",
                "names: dict[Var, Any] = dict(zip(self.given, self.given, strict=True))",
            ),
        ),
        (
            f"{BLOCKS}test_other_losses[with_views]",
            f"{BLOCKS}test_what_a_block_is_given_must_be_as_distinct_as_before",
            f"{BITS}test_one_rank_is_what_micro_batches_are",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 offsets",
        "calls are copied although they count from the start of a storage",
        (("    return instr.inputs() if counts else ()", "    return ()"),),
        (f"{BLOCKS}test_other_losses[with_an_absolute_offset]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 writes",
        "calls that write what they are given are copied, past the rules of what may be written",
        (
            (
                "for var in (*instr.writes, *_read_from_the_start(instr)))",
                "for var in _read_from_the_start(instr))",
            ),
        ),
        (f"{BLOCKS}test_a_block_that_writes_what_it_is_given_is_recorded_each_time",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 compiled",
        "a function that is compiled once for equal parts gets the arguments of the first of them each time",
        (("(one.inputs), {}, one.outputs, (), None)", "(first.inputs), {}, one.outputs, (), None)"),),
        ("tests/test_parts.py::test_a_leaf_is_written_after_its_last_reader",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 comparison",
        "a function that is compiled for a stage is compared with its calls on the first micro-batch alone",
        (
            (
                "            if counts[head] in (1, self.heads[head]):\n",
                "            if counts[head] == 1:\n",
            ),
        ),
        (
            f"{COMPILED}test_a_mistake_on_the_first_or_the_last_micro_batch_is_refused[2]",
            f"{COMPILED}test_a_function_is_compared_as_often_whatever_the_number_of_micro_batches",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 memory",
        "what a stage of a later micro-batch gets is free only after it",
        (
            (
                "                unit.reads = frozenset({GIVEN})\n",
                "                unit.reads |= {GIVEN}\n",
            ),
        ),
        (f"{TEMPLATES}test_a_template_frees_what_it_is_given_after_its_last_use",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N112 numbers",
        "a number that differs between ranks counts for nothing",
        (
            (
                'dict.fromkeys(others.get(number, ()), f"a number of Python in {instr.op}")',
                "{}",
            ),
        ),
        (f"{TEMPLATES}test_a_number_that_differs_between_ranks_counts_where_a_template_is_called",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N113",
        "a leaf that stages of two ranks read gets the gradient of one of them",
        (("            return all_reduce(own, axis)\n", "            return own\n"),),
        (f"{BITS}test_each_schedule_on_two_ranks[everything-gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N114",
        "ranks do not ask whether others receive what they send",
        (("        _refuse_unmet(traced, lowered, mesh, mesh.stages)\n", "        pass\n"),),
        (
            f"{MISTAKES}test_ranks_that_do_not_fit_together_say_so_before_anything_is_sent[schedule]",
            f"{MISTAKES}test_ranks_that_do_not_fit_together_say_so_before_anything_is_sent[batch]",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N114 order",
        "ranks compare in which order they sum as traced, not as it will run",
        (("for instr in live_instrs(lowered)\n", "for instr in live_instrs(program)\n"),),
        (f"{GROUPS}test_sums_in_one_group_have_one_order_on_all_ranks_as_they_will_run",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N115 weights",
        "the gradient that another rank waits for is sent after those of weights",
        (
            (
                '        return [replace(action, kind="I"), replace(action, kind="W")]\n',
                "        return [action]\n",
            ),
        ),
        (f"{TABLES}test_what_transfers_take_does_not_grow_with_the_micro_batches[False-1f1b]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N115 receives",
        "a receive is launched after the computation during which it arrives",
        (("    for action in sorted(ends, key=ends.__getitem__):\n", "    for action in ends:\n"),),
        (
            f"{TABLES}test_what_transfers_take_does_not_grow_with_the_micro_batches[False-1f1b]",
            f"{TABLES}test_what_transfers_take_does_not_grow_with_the_micro_batches[True-interleaved]",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N115",
        "a table is run without a proof that it ends",
        (
            (
                "        TopologicalSorter(_waits(table)).prepare()\n",
                "        pass\n",
            ),
        ),
        (f"{TABLES}test_what_is_accepted_ends_and_what_is_refused_does_not",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N193",
        "a capture keeps what it has sent until its end, since the allocator is told of another stream",
        (("send([_lent(value.contiguous())], to, 0)", "send([value.contiguous()], to, 0)"),),
        (f"{TRANSFERS}test_bytes_go_from_memory_to_memory_that_the_allocator_does_not_know[shape2-dtype0]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N194",
        "what a plan drops at one place is said to be freed in another order",
        (
            (
                "        for memory in () if handed or unit.commits else place.frees:\n",
                "        for memory in () if handed or unit.commits else place.frees[::-1]:\n",
            ),
        ),
        (f"{RESERVE}test_what_a_plan_is_said_to_allocate_it_does[named_late-True]",),
        no_gpu="what is said is the same there",
    ),
    Mutant(
        "N194 beside",
        "what attention's backward takes beside its results is not said",
        (("(size := beside(unit.call)) > _LARGE:\n", "(size := 0) > LARGE:\n"),),
        (f"{RESERVE}test_in_half_precision_attention_takes_memory_beside_its_gradients[dtype1]",),
        no_gpu="what is said is the same there",
    ),
)
