"""Mutants of branches: a race in the schedule that its check does not see, and checks that see none."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BRANCHES"]

LAWS, RACES = "tests/properties/test_branches.py::", "tests/test_races.py::"
RANKS, ORDER = "tests/sharding/test_branches_on_ranks.py::", "tests/sharding/test_order.py::"
SEVERAL = "it takes several GPUs; the same tests run there, `-m multi_gpu`"
WARM_UP = "tests/hazards/test_h57_h71_randomness_and_warm_up.py::"
ON_A_GPU = "which of two lanes is first on a GPU is a matter of chance"
BLIND = (
    "        refuse_races(self.timeline, program.function)\n",
    "        _ = refuse_races\n",
)

WRAPPER = "tests/test_wrapper.py::"
IN_ANY_ORDER = f"{WRAPPER}test_launches_in_any_order"

BRANCHES = (
    Mutant(
        "N116",
        "a lane does not wait for what it needs of another lane, and nobody checks",
        (("tuple(sorted(waits)), tuple(free)", "tuple(sorted(waits)[1:]), tuple(free)"), BLIND),
        (
            f"{LAWS}test_exact_programs_in_branches",
            f"{LAWS}test_steps_in_branches[heads-2]",
            f"{LAWS}test_steps_in_branches[into_views-5]",
        ),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N117",
        "a lane reuses memory that another lane still reads, and nobody checks",
        (
            (
                "free = [memory for memory in own if all(clocks.covers(place.lane, one) for one in using[memory])]",
                "free = [*own]",
            ),
            BLIND,
        ),
        (f"{LAWS}test_memory_read_on_another_lane_is_not_reused",),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N118",
        "a lane commits new values while another one reads the old ones, and nobody checks",
        (
            ("            before.update(readers.pop(memory, ()))\n", "            readers.pop(memory, ())\n"),
            BLIND,
        ),
        (
            f"{LAWS}test_a_commit_waits_for_all_that_read_the_old_value",
            f"{LAWS}test_steps_in_branches[read_by_two_written_by_a_third-2]",
        ),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N119",
        "a dropped edge, an early reuse of memory and a branch past the commit pass the check",
        (
            (
                "                if other > place.unit or not clocks.covers(",
                "                if False and not clocks.covers(",
            ),
            (
                "            if not here or not all(clocks.covers(",
                "            if False and not all(clocks.covers(",
            ),
        ),
        (
            f"{RACES}test_each_dropped_edge_is_refused[2-0]",
            f"{RACES}test_each_dropped_edge_is_refused[3-2]",
            f"{RACES}test_a_branch_past_the_commit_is_refused",
            f"{RACES}test_an_early_reuse_of_memory_is_refused",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N120",
        "lanes trust a kernel that returns its argument where the trace saw a new tensor",
        (("        if self.timeline.lanes > 1 and not self._rehearsed:\n", "        if False:\n"),),
        (f"{LAWS}test_a_kernel_that_returns_other_memory_than_traced_runs_in_one_line",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N121",
        "ops of other libraries run on lanes",
        (
            (
                '    if why := next((unit.fixed for unit in line.units if unit.fixed), ""):\n',
                '    if why := "":\n',
            ),
        ),
        (f"{LAWS}test_ops_of_other_libraries_run_in_one_line",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N122",
        "a lane of a compiled step goes on with the stream of the lane before",
        (("    run(*args, stream=stream_of(stream))\n", "    run(*args, stream=stream)\n"),),
        (IN_ANY_ORDER,),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N123",
        "a Triton kernel only reads what its signature says that it writes, too",
        (
            (
                'own and one.startswith("in_ptr") and one not in mutated',
                'own and one.startswith("in_")',
            ),
        ),
        (
            f"{WRAPPER}test_what_a_launch_touches[half.run(arg0_1, arg1_1, c0, c0, 8, stream=stream0)-reads3-writes3]",
        ),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N124",
        "a view in a compiled step is taken for memory of its own",
        (
            (
                "            return self._variables.get(value) or self._variables.new(value)\n",
                (
                    "            made = self._variables.get(value) or self._variables.new(value)\n"
                    "            made.storage = made.index\n"
                    "            return made\n"
                ),
            ),
        ),
        (f"{WRAPPER}test_memory_belongs_to_what_first_touches_it",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N125",
        "lanes trust an op of a compiled step that returns its argument where its code says a new tensor",
        (("    if not surprise:\n", "    if True:\n"),),
        (f"{WRAPPER}test_an_op_that_returns_other_memory_than_its_trace_says_holds_all_on_one_lane",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N126",
        "a launch of a compiled step, of a kind that nobody knows, runs on any lane",
        (
            (
                "                scope[name] = partial(_refused, name)\n",
                "                scope[name] = _nothing\n",
            ),
        ),
        (f"{WRAPPER}test_other_statements_end_the_reading[unheard_of(arg0_1)]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N127",
        "ranks do not compare the order of their collectives, in which one of them differs",
        (("        *_collectives(lowered, mesh),\n", ""),),
        (f"{RANKS}test_an_order_that_differs_by_rank_is_refused_before_the_capture[gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N127 lanes",
        "each rank runs its collectives in the order in which its lanes come to them",
        (("        LINK: is_collective(instr.op),\n", ""),),
        (f"{RANKS}test_the_order_of_collectives_is_a_matter_of_memory",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N128",
        "a collective is started before the last that writes what it sends, and nobody checks",
        (
            (
                "        for memory in unit.reads | unit.writes:\n            if memory in writer:\n",
                (
                    "        for memory in unit.writes if unit.link else unit.reads | unit.writes:\n"
                    "            if memory in writer:\n"
                ),
            ),
            ("    refuse_races(found, program.function)\n", "    _ = refuse_races\n"),
        ),
        (f"{ORDER}test_another_order_changes_no_value", f"{ORDER}test_laws_of_collectives_on_lanes"),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N128 sent",
        "what a collective still sends is written, since the wait for it has moved behind",
        ((" or one.reads & unit.writes]\n", "]\n"),),
        (f"{ORDER}test_what_is_sent_is_written_after_the_wait",),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N128 wait",
        "the wait for a collective is taken for a call that makes new memory",
        (("            shared[instr.out.storage] = instr.args[0].storage\n", "            pass\n"),),
        (f"{RANKS}test_collectives_run_beside_calls_and_explain_shows_it[3-gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N129",
        "a commit does not wait for what it copies: a weight's gradient comes behind it",
        (
            (
                '"new state", calls, after_checks(read), frozenset(old.',
                '"new state", calls, after_checks(() if read else read), frozenset(old.',
            ),
        ),
        (
            f"{LAWS}test_a_commit_waits_for_all_that_read_the_old_value",
            f"{RANKS}test_collectives_run_beside_calls_and_explain_shows_it[3-gloo]",
        ),
        no_gpu=ON_A_GPU,
    ),
    Mutant(
        "N129 room",
        "all leaves are gathered at once, whatever memory that takes",
        (("or self._taken + made <= self._limit\n", "or self._limit >= 0\n"),),
        (
            f"{ORDER}test_gathers_run_ahead_as_far_as_there_is_room[1]",
            f"{ORDER}test_laws_of_collectives_on_lanes",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N175",
        "lanes that gain less than a measurement can tell replace one line",
        (("    if on_lanes * _FASTER < in_line:\n", "    if on_lanes < in_line:\n"),),
        ("tests/test_compiled_branches.py::test_lanes_stay_if_they_are_measured_to_be_faster[aten-0.98]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N176",
        "a warm-up goes on where its last run has ended",
        (("        for call in copies(self.copied, self.originals):\n", "        for call in ():\n"),),
        (f"{WARM_UP}test_h198_each_run_of_a_warm_up_begins_where_the_state_is[simulator]",),
        no_gpu="a fault there would end the process of the tests",
    ),
    Mutant(
        "N185",
        "what reads a view does not wait for the other value that it waits for",
        (("                unit.writes |= {marks[number]}\n", "                marks.clear()\n"),),
        ("tests/sharding/test_order.py::test_another_order_changes_no_value",),
        no_gpu="told on the host",
    ),
)
