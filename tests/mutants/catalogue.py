"""The mutants: wrong implementations, each the shipped code with one thing wrong.

What a naive implementation does literally is often impossible here (nothing that the caller owns is ever an address in
a plan), so each is the nearest mistake that this architecture allows; where that is not the literal one, ``what`` says
so. ``general`` is a record: ``python -m tests.mutants --general`` measures it.
"""

from __future__ import annotations

from tests.mutants.branches import BRANCHES
from tests.mutants.masks import MASKS
from tests.mutants.mutant import Mutant
from tests.mutants.parts import PARTS
from tests.mutants.pipelines import PIPELINES
from tests.mutants.sharded import SHARDED
from tests.mutants.silent import SILENT

OWNERSHIP = "tests/test_ownership.py::"
REPLAY = "tests/properties/test_replay.py::"
SIMULATOR = "tests/properties/test_simulator.py::"
REFUSALS = "tests/refusals/"
BETWEEN = "tests/test_between_calls.py::"
LEFT = "tests/test_left_behind.py::"
OLD_VALUES = "tests/test_old_values.py::"
TRIAL = "tests/test_trial.py::"
FIXED = "tests/test_fixed_tensors.py::test_a_change_on_the_original_is_noticed_at_the_next_call"
HOST = "tests/host/"
TURNS = "tests/test_turns.py::"
SIGNALS = "tests/test_signals.py::"
AFTER_FAILURE = "tests/test_after_failure.py::"
GPU = "tests/cuda/"
GPU_OWNERSHIP = f"{GPU}test_ownership_cuda.py::"
HAZARDS = "tests/hazards/"

MUTANTS = (
    Mutant(
        "N1",
        "returns static outputs: metrics are not copied out of the pool",
        (("tensors = static if self._fresh else copy_out(static)", "tensors = static"),),
        (
            f"{OWNERSHIP}test_what_was_returned_never_changes[simulator]",
            f"{OWNERSHIP}test_gradients_returned_are_owned_and_sum_in_order[simulator]",
            f"{OWNERSHIP}test_writing_into_what_was_returned_has_no_effect[simulator]",
        ),
        general=("streams", "machine"),
        gpu=(
            f"{GPU_OWNERSHIP}test_metrics_are_new_each_time_and_writing_them_is_harmless",
            f"{HAZARDS}test_h01_h09_outputs.py::test_h04_views_are_returned_as_memory_of_their_own[cuda]",
        ),
    ),
    Mutant(
        "N1 in place",
        "the compiler waits with what reads a slot until an op has written it: what is old is new",
        (
            (
                "    _read_before_writes(graph)\n",
                "",
            ),
        ),
        (
            f"{OLD_VALUES}test_what_reads_a_leaf_that_an_op_of_ones_own_writes_into[cpu as a GPU]",
            f"{OLD_VALUES}test_a_metric_that_is_a_leaf_but_for_a_part[cpu as a GPU]",
        ),
        gpu=(f"{OLD_VALUES}test_what_reads_a_leaf_that_an_op_of_ones_own_writes_into[cuda]",),
    ),
    Mutant(
        "N33",
        "a compiler drops the copy of an old leaf: what leaves is not owned",
        (("    return clone(value)\n", "    return value\n"),),
        (f"{OLD_VALUES}test_leaves_that_change_places[cpu as a GPU]",),
        gpu=(
            f"{OLD_VALUES}test_old_values_compiled[cuda]",
            f"{OLD_VALUES}test_leaves_that_change_places[cuda]",
        ),
    ),
    Mutant(
        "N34",
        "a compiled host step writes the state while it computes: what raises later leaves it half written",
        (
            (
                "        in_place = compiler is None and (on_gpu or lanes)\n",
                "        in_place = compiler is None\n",
            ),
        ),
        (
            "tests/test_host_errors.py::test_an_index_out_of_range[rows]",
            "tests/test_host_errors.py::test_what_else_raises[an op of one's own]",
        ),
        no_gpu="on a GPU no kernel raises",
    ),
    Mutant(
        "N35",
        "a part of a state is taken for any other part of the same layout",
        (("                or state._part.start != start\n", ""),),
        (f"{HOST}test_errors.py::test_another_part_of_a_state_is_another_argument",),
        no_gpu="the argument is judged on the host, before anything is launched",
    ),
    Mutant(
        "N36",
        "values of two types that Python calls equal bake one graph",
        (
            (
                "    if type(new) is not type(old) or isinstance(new, torch.Tensor):\n",
                "    if isinstance(new, torch.Tensor):\n",
            ),
        ),
        (f"{HOST}test_errors.py::test_a_value_is_another_one_if_and_only_if_its_text_is",),
        no_gpu="values of the host are compared on the host",
    ),
    Mutant(
        "N37",
        "0.0 and -0.0 bake one graph",
        (("            return _bits(new) == _bits(old)\n", "            return bool(new == old)\n"),),
        (
            f"{HOST}test_errors.py::test_a_value_is_another_one_if_and_only_if_its_text_is",
            f"{HOST}test_containers.py::test_row[the sign of zero]",
        ),
        no_gpu="values of the host are compared on the host",
    ),
    Mutant(
        "N65",
        "an iterator that two traces move to equal numbers goes unnoticed",
        (("        elif advances(value):\n", "        elif value is None:\n"),),
        (f"{HOST}test_moving.py::test_what_is_taken_is_refused[itertools.cycle([2.0])-next(it)]",),
        no_gpu="the Python of a step runs on the host",
    ),
    Mutant(
        "N48",
        "a compiled step is judged by itself: the program beside it is the plan once more",
        (
            (
                "off, sizes = between(outputs, expected)",
                "off, sizes = between(expected, expected)",
            ),
        ),
        (
            f"{TRIAL}test_a_planted_mistake_is_refused[a wrong stride-cpu]",
            f"{TRIAL}test_a_planted_mistake_is_refused[a sum over the wrong axis-cpu]",
        ),
        gpu=(f"{TRIAL}test_a_planted_mistake_is_refused[a wrong stride-cuda]",),
    ),
    Mutant(
        "N49",
        "the trial sees the first step alone, at which a rate that warms up is zero",
        (
            (
                "        for kind in (*KINDS, OVERFLOW) if half else KINDS:",
                "        for kind in ():",
            ),
        ),
        (f"{TRIAL}test_a_planted_mistake_is_refused[a dropped clone-cpu]",),
        gpu=(f"{TRIAL}test_a_planted_mistake_is_refused[a dropped clone-cuda]",),
    ),
    Mutant(
        "N50",
        "rounding is taken to be an ulp of the result, whatever the step makes of it",
        (
            (
                "        for number in range(len(_RUNS) + 1):",
                "        for number in range(1):",
            ),
        ),
        (f"{TRIAL}test_rounding_is_no_mistake[gpt]",),
        no_gpu="the place where rounding is measured is the same",
    ),
    Mutant(
        "N51",
        "debug=verify compares what was compiled with itself alone",
        (
            (
                "            self._refuse_miscompiled(call, lowered, outputs, fresh())\n",
                "",
            ),
        ),
        (
            f"{TRIAL}test_a_verified_call_finds_what_the_certificate_does[a wrong stride-cpu]",
            f"{TRIAL}test_a_verified_call_finds_what_the_certificate_does[a dropped clone-cpu]",
        ),
        gpu=(f"{TRIAL}test_a_verified_call_finds_what_the_certificate_does[a dropped clone-cuda]",),
    ),
    Mutant(
        "N53",
        "a view that was recorded is made of what the compiler laid out otherwise",
        (("    if instr.op in VIEWS and instr.out.storage not in written:", "    if False:"),),
        ("tests/test_stages.py::test_what_a_compiler_lays_out_otherwise_is_viewed_all_the_same",),
        no_gpu="the graph is the same",
    ),
    Mutant(
        "N54",
        "the compiler does a call in what leaves the step, since nobody seems to read it later",
        (
            (
                '_library.define("own(Tensor(a) value) -> Tensor(a)")',
                '_library.define("own(Tensor value) -> Tensor")',
            ),
            (
                "    _library._register_fake(_name, _aten.alias.default)",
                "    _library._register_fake(_name, torch.empty_like)",
            ),
        ),
        (f"{OLD_VALUES}test_a_value_that_is_kept_beside_itself_but_for_a_part[cpu]",),
        gpu=(f"{OLD_VALUES}test_a_value_that_is_kept_beside_itself_but_for_a_part[cuda]",),
    ),
    Mutant(
        "N55",
        "a view that torch makes is taken for memory of its own",
        (("        _copy_for_foreign_views(graph, argument)\n", "        del argument\n"),),
        (f"{OLD_VALUES}test_views_that_a_compiler_leaves_to_torch[cpu as a GPU-from the fourth call on]",),
        gpu=(f"{OLD_VALUES}test_views_that_a_compiler_leaves_to_torch[cuda-from the fourth call on]",),
    ),
    Mutant(
        "N70",
        "a leaf is read without taking turns: another thread may be writing it",
        (
            (
                "            return _rewrap(sources[0]._turn.read(compute), sources)\n",
                "            return _rewrap(compute(), sources)\n",
            ),
        ),
        (f"{TURNS}test_who_reads_while_another_thread_writes_waits[aminmax]",),
        no_gpu="a read is queued like any op; what takes the turn is the same",
    ),
    Mutant(
        "N71",
        "a step may be called in the middle of its own call, by the handler of a signal",
        (
            (
                "                if busy and (self._donates or not turn.whole):\n",
                "                if busy and turn.over is not None:\n",
            ),
        ),
        (f"{TURNS}test_in_the_middle_of_a_step_reads_work_and_writes_are_refused[step]",),
        no_gpu="the same Python on the host",
    ),
    Mutant(
        "N72",
        "Ctrl-C alone waits for the end of a trace",
        (
            (
                "known.items() if callable(handler)}",
                "known.items() if callable(handler) and number == signal.SIGINT}",
            ),
        ),
        (
            f"{SIGNALS}test_signals_wait_for_the_end_of_a_capture",
            f"{SIGNALS}test_a_handler_may_call_the_library_in_a_trace",
        ),
        no_gpu="the same Python on the host",
    ),
    Mutant(
        "N73",
        "a layout that has never run takes the place of another",
        (
            (
                "            if not lowered.counts and lowered.refuted is None:\n                self._forget",
                "            if False:\n                self._forget",
            ),
            ("[one for one in group if not one.counts and one.refuted is None]", "[]"),
        ),
        (
            f"{AFTER_FAILURE}test_a_layout_that_was_lowered_only_takes_no_place",
            f"{AFTER_FAILURE}test_a_layout_whose_first_call_fails_takes_no_place[IndexError]",
        ),
        gpu=(f"{AFTER_FAILURE}test_the_largest_batch_is_looked_for[aten]",),
    ),
    Mutant(
        "N74",
        "a refused trace leaves its fake tensors where they are",
        (
            (
                (
                    "    for run in runs:\n"
                    "        disown(run.program, run.history.given, run.release(), run.variables.standing)\n"
                ),
                "    for run in runs:\n        run.release()\n",
            ),
        ),
        (f"{AFTER_FAILURE}test_what_a_refused_trace_leaves_in_caches_has_values[lru_cache-a random number]",),
        no_gpu="a trace runs on the host",
    ),
    Mutant(
        "N2 inputs",
        "adopts the first call's inputs as static buffers",
        (("        staging.copy_in(call.live)\n", "        staging.slots = tuple(call.live)\n"),),
        (f"{OWNERSHIP}test_a_batch_that_is_kept_stays_as_it_was[cpu]",),
        general=("streams", "machine"),
        gpu=(f"{HAZARDS}test_h10_h29_inputs.py::test_h11_what_the_caller_keeps_stays_as_it_was[cuda]",),
    ),
    Mutant(
        "N2 state",
        "adopts the leaves of a plain state as slots",
        (
            (
                (
                    "            for call in copies(lease.arena.slots, [leaf.detach() for leaf in leaves]):\n"
                    "                call()\n"
                ),
                "            lease.arena.slots = tuple(leaf.detach() for leaf in leaves)\n",
            ),
        ),
        (
            f"{OWNERSHIP}test_a_plain_state_stays_the_callers[cpu]",
            f"{OWNERSHIP}test_a_plain_state_stays_the_callers[simulator]",
        ),
        general=("programs", "streams", "optimizers", "machine"),
        gpu=(f"{HAZARDS}test_h10_h29_inputs.py::test_h11_what_the_caller_keeps_stays_as_it_was[cuda]",),
    ),
    Mutant(
        "N3",
        "closes over the module: an unknown tensor becomes a constant in silence",
        (
            (
                "        self._adopt(func, args, kwargs)\n",
                (
                    "        for tensor in tensors_in([*args, *kwargs.values()]):\n"
                    "            if not isinstance(tensor, FakeTensor) and id(tensor) not in self.declared:\n"
                    "                with unset_fake_temporarily():\n"
                    '                    self.declare("closure", tensor)\n'
                ),
            ),
        ),
        (
            f"{OWNERSHIP}test_a_closed_over_tensor_is_refused_with_its_place",
            f"{OWNERSHIP}test_a_closed_over_module_is_refused",
        ),
        gpu=(f"{GPU}test_refusals_cuda.py::test_tensor_of_the_host_that_is_closed_over",),
    ),
    Mutant(
        "N4",
        "keeps addresses without ownership: nobody holds the constants that a capture reads",
        (("lowered, replay, tuple(constants)", "lowered, replay, ()"),),
        (
            f"{OWNERSHIP}test_constants_are_the_steps_own[simulator]",
            f"{REPLAY}test_literals_and_constants_live_as_long_as_the_capture[simulator]",
        ),
        general=("streams",),
        no_gpu="a replay of a graph holds the bound plan, and with it the constants a second time",
    ),
    Mutant(
        "N5 address",
        "skips the copy-in of what lies at the address of the last call",
        (
            (
                "            torch._foreach_copy_(self.slots, leaves)\n",
                (
                    '            seen = self.__dict__.setdefault("seen", {})\n'
                    "            for i, leaf in enumerate(leaves):\n"
                    "                if seen.get(i) != leaf.data_ptr():\n"
                    "                    self.slots[i].copy_(leaf)\n"
                    "                seen[i] = leaf.data_ptr()\n"
                ),
            ),
            (" if queued else partial(torch._foreach_copy_, staging.slots)", ""),
            (
                "            for i in here:\n                self.slots[i].copy_(leaves[i])\n",
                (
                    '            seen = self.__dict__.setdefault("seen", {})\n'
                    "            for i in here:\n"
                    "                if seen.get(i) != leaves[i].data_ptr():\n"
                    "                    self.slots[i].copy_(leaves[i])\n"
                    "                seen[i] = leaves[i].data_ptr()\n"
                ),
            ),
        ),
        (
            f"{REPLAY}test_one_address_with_other_strides_is_read_anew",
            f"{OWNERSHIP}test_the_caller_may_overwrite_its_inputs_when_the_call_returns[tensor-cpu]",
        ),
        general=("streams", "machine"),
        gpu=(f"{HAZARDS}test_h10_h29_inputs.py::test_h12_one_address_is_read_anew_at_each_call[cuda]",),
    ),
    Mutant(
        "N5 layout",
        "copies in without looking at shapes and dtypes: copy_ broadcasts and casts",
        (("{t}.shape != {name(want.shape)} or {t}.dtype is not {name(want.dtype)} ", "{t}.is_sparse "),),
        (
            f"{REPLAY}test_a_broadcastable_shape_is_refused[(1, 3)]",
            f"{REPLAY}test_a_broadcastable_shape_is_refused[()]",
            f"{REPLAY}test_another_dtype_is_refused[torch.int64]",
        ),
        general=("machine",),
        gpu=(
            f"{HAZARDS}test_h10_h29_inputs.py::test_h13_no_shape_is_broadcast[cuda]",
            f"{HAZARDS}test_h10_h29_inputs.py::test_h14_no_dtype_is_cast[torch.int64-cuda]",
        ),
    ),
    Mutant(
        "N6",
        "takes gradients through .grad of the leaves handed in, for somebody else to reset",
        (
            ("    return leaf.detach().requires_grad_()\n", "    return leaf.requires_grad_()\n"),
            (
                "    grads = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)\n",
                (
                    "    value.backward(create_graph=create_graph)\n"
                    "    grads = [leaf.grad for leaf in leaves]\n"
                ),
            ),
        ),
        (
            f"{OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[twice]",
            f"{OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[micro-batches]",
        ),
        general=("machine",),
        gpu=(
            f"{GPU_OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[twice]",
            f"{HAZARDS}test_h30_h39_gradients.py::test_h31_gradients_of_a_first_step_are_those_of_torch_func[cuda]",
        ),
    ),
    Mutant(
        "N7",
        "Python numbers and flags: what the step's Python reads is not compared at each call",
        (("    try:\\n{body}        return True\\n", "    try:\\n        return True\\n"),),
        (
            f"{OWNERSHIP}test_a_host_value_that_changed_is_loud[cpu]",
            f"{OWNERSHIP}test_a_host_value_that_changed_is_loud[simulator]",
        ),
        gpu=(f"{GPU_OWNERSHIP}test_a_host_value_that_changed_is_loud",),
    ),
    Mutant(
        "N8",
        "warm-up is not rolled back: it runs on the state's own slots",
        (
            (
                "spare = functools.partial(scratch, buffers, lowered.reference.unchecked.slots)",
                "spare = lambda: buffers",
            ),
        ),
        (
            f"{REPLAY}test_call_n_is_n_updates[simulator]",
            f"{REPLAY}test_bias_correction_and_schedule_move_with_the_count[simulator]",
        ),
        general=("programs", "streams", "optimizers", "machine"),
        gpu=(f"{HAZARDS}test_h57_h71_randomness_and_warm_up.py::test_h65_call_n_is_n_updates[cuda]",),
    ),
    Mutant(
        "N9",
        "no fork and join: a call on another stream does not wait for the arena's last use",
        (("            self._order_after(self.stream, current)\n", "            pass\n"),),
        (f"{SIMULATOR}test_calls_on_any_streams_are_done_in_order",),
        general=("streams", "machine"),
        gpu=(
            f"{GPU_OWNERSHIP}test_caller_alternates_streams_behind_long_kernels[aten]",
            f"{GPU}test_state_cuda.py::test_a_leaf_read_on_another_stream_waits_for_the_last_update",
        ),
    ),
    Mutant(
        "N10",
        "randomness is not managed: draws take torch's generator, which a graph knows at one offset only",
        (
            (
                "        if can_draw(func, args, kwargs):\n            raise self._random(func)\n",
                "",
            ),
            (
                "    return random_bits(key, stream, n)\n",
                "    return torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, device=key.device)\n",
            ),
        ),
        (
            f"{REPLAY}test_replay_equals_eager_for_training[cpu]",
            f"{REPLAY}test_replay_equals_eager_for_training[simulator]",
            f"{REFUSALS}test_random_ops.py::test_draw_is_refused[rrelu]",
        ),
        general=("programs", "streams", "machine"),
        gpu=(f"{GPU}test_random_cuda.py::test_replay_draws_anew_from_a_new_key[uniform]",),
    ),
    Mutant(
        "N11",
        "clipping is decided on the host; a trace cannot read the norm, so it decides for ever that gradients are long",
        (
            (
                "        factor = self.max_norm / global_norm(flat, self.order).clamp(min=self.max_norm)\n",
                (
                    "        norm = global_norm(flat, self.order)\n"
                    "        if type(norm) is Tensor and norm <= self.max_norm:\n"
                    "            return updates, state\n"
                    "        factor = self.max_norm / norm\n"
                ),
            ),
        ),
        (
            f"{REPLAY}test_replay_equals_eager_for_training[cpu]",
            f"{REPLAY}test_replay_equals_eager_for_every_optimizer[flat-cpu]",
        ),
        general=("optimizers",),
        gpu=(f"{GPU}test_agreement.py::test_mlp_with_dropout_clip_and_schedule",),
    ),
    Mutant(
        "N12",
        "a pinned staging slot is filled again before the device has read it",
        (("            self._sent.synchronize()\n", "            pass\n"),),
        (
            f"{SIMULATOR}test_host_memory_is_free_at_once_behind_a_busy_stream[tensor]",
            f"{SIMULATOR}test_host_memory_is_free_at_once_behind_a_busy_stream[numpy]",
        ),
        general=("streams", "machine"),
        gpu=(f"{GPU_OWNERSHIP}test_host_batches_are_free_at_once_behind_a_busy_device",),
    ),
    Mutant(
        "N13",
        "a pool is shared while outputs live in it: what a graph_fn returns is not copied out",
        (
            (
                "tensors = static if self._fresh else copy_out(static)",
                "tensors = static if self._fresh or not self._donates else copy_out(static)",
            ),
        ),
        (f"{SIMULATOR}test_outputs_of_an_evaluation_outlive_other_replays[simulator]",),
        general=("machine",),
        gpu=(f"{GPU_OWNERSHIP}test_what_evaluations_returned_outlives_other_replays",),
    ),
    Mutant(
        "N14 state",
        "no clean-up after an exception: a call gives the old state up before its kernels have run",
        (
            (
                "if functions else [])])}):\\n",
                "if functions else [])])}):\\n    uninterrupted(before)\\n",
            ),
        ),
        (f"{SIMULATOR}test_a_replay_that_raises_consumes_nothing[cpu]",),
        no_gpu="a replay is one launch: nothing that its kernels do raises an exception on the host",
    ),
    Mutant(
        "N14 capture",
        "no clean-up after an exception: a capture whose first replay failed stays",
        (
            ("            if new and key in self._captured:\n", "            if False:\n"),
            (
                "            if not lowered.counts and lowered.refuted is None:\n                self._forget",
                "            if False:\n                self._forget",
            ),
        ),
        (f"{AFTER_FAILURE}test_a_layout_whose_first_call_fails_takes_no_place[IndexError]",),
        no_gpu="what a step raises on the host it raises in the warm-up, before there is a capture",
    ),
    Mutant(
        "N14 commit",
        "Ctrl-C may strike in the middle of the commit",
        (("    deque(map(operator.call, calls), maxlen=0)\n", ("    for call in calls:\n        call()\n")),),
        (
            f"{OWNERSHIP}test_ctrl_c_at_every_bytecode_of_a_call[cpu]",
            f"{OWNERSHIP}test_ctrl_c_at_every_bytecode_of_a_call[simulator]",
        ),
        gpu=(f"{GPU_OWNERSHIP}test_ctrl_c_at_every_bytecode_of_a_call",),
    ),
    Mutant(
        "N15",
        "a handle without generation: the update does not raise it",
        (
            ("(partial(setitem, lease.cell, 0, generation + 1),)", "()"),
            ("new = Handle(lease, generation + 1)", "new = Handle(lease, generation)"),
        ),
        (
            f"{REPLAY}test_an_old_state_never_shows_new_values[cpu]",
            f"{REPLAY}test_an_old_state_never_shows_new_values[simulator]",
        ),
        general=("machine",),
        gpu=(f"{GPU_OWNERSHIP}test_use_after_donation_is_loud",),
    ),
    Mutant(
        "N16",
        "sequential commit: a new leaf that is another slot is not staged",
        (
            (
                "    plan.staged = {old for old, new in plan.commits if new.storage in in_slots}\n",
                "    plan.staged = set()\n",
            ),
        ),
        (
            f"{REPLAY}test_commit_is_parallel[cpu]",
            f"{REPLAY}test_commit_is_parallel[simulator]",
        ),
        general=("programs", "streams", "machine"),
        gpu=(f"{GPU_OWNERSHIP}test_swapped_and_rotated_leaves[aten]",),
    ),
    Mutant(
        "N17",
        "silent eager fallback: runs the Python each time, and counts it as a replay",
        (
            (
                "            captured = self._captured_for(call, lowered)\n            done",
                (
                    "            self.stats.replays += 1\n"
                    "            done = run_eager(self._fn, call, self._name, self.taps, donates=self._donates)\n"
                    "            return lambda: done\n"
                    "            captured = self._captured_for(call, lowered)\n            done"
                ),
            ),
        ),
        (f"{REPLAY}test_the_python_body_runs_at_trace_time_only",),
        gpu=(f"{GPU}test_capture.py::test_the_body_runs_at_trace_time_only[aten]",),
    ),
    Mutant(
        "N18",
        "class-level globals: all steps of a process look up their programs and captures in one place",
        (
            (
                "    _donates: bool\n    _kind: str\n",
                "    _donates: bool\n    _kind: str\n    _lowered: Any = {}\n    _captured: Any = {}\n",
            ),
            ("        self._lowered: dict[tuple[Any, ...], list[Lowered]] = {}\n", ""),
            ("        self._captured: dict[tuple[int, Any], Captured] = {}\n", ""),
        ),
        (
            f"{REPLAY}test_two_trainers_interleaved_equal_separate_runs[cpu]",
            f"{REPLAY}test_two_trainers_interleaved_equal_separate_runs[simulator]",
        ),
        general=("programs", "streams", "optimizers", "machine"),
        gpu=(
            f"{GPU}test_lifecycle_cuda.py::test_one_of_two_steps_is_destroyed[aten]",
            f"{HAZARDS}test_h104_h112_lifecycle.py::test_h111_two_trainers_in_one_process_are_independent[cuda]",
        ),
    ),
    Mutant(
        "N19 momentum",
        "a baked branch for the first step: momentum starts anew with each gradient, as it should in the first",
        (
            (
                "lr=lr, maximize=False, **numbers)\n",
                (
                    "lr=lr, maximize=False, **{\n"
                    "            name: type(leaf) is not Tensor if name == 'is_first_step' else number\n"
                    "            for name, number in numbers.items()\n"
                    "        })\n"
                ),
            ),
        ),
        (f"{REPLAY}test_replay_equals_eager_for_every_optimizer[sgd-cpu]",),
        general=("optimizers",),
        gpu=(f"{GPU}test_agreement.py::test_optimizers[sgd]",),
    ),
    Mutant(
        "N19 micro-batches",
        "the branch of the first micro-batch is that of all: a sum is overwritten and not added to",
        (("new if i in handed else old + new\n", "new\n"),),
        (f"{OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[micro-batches]",),
        gpu=(f"{GPU_OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[micro-batches]",),
    ),
    Mutant(
        "N20",
        "no liveness check: a tensor of the step that outlives its trace is not noticed",
        (
            (
                "refuse_kept(recipe.name, recorder.program, recorder.variables.standing, recorder.release())\n",
                "recorder.release()\n",
            ),
        ),
        (
            f"{REFUSALS}test_side_effects.py::test_tensor_that_is_kept[keep_in_a_cache]",
            f"{REFUSALS}test_side_effects.py::test_tensor_that_is_kept[keep_in_an_attribute]",
        ),
        gpu=(f"{GPU}test_refusals_cuda.py::test_tensor_that_is_kept",),
    ),
    *SHARDED,
    *PIPELINES,
    *BRANCHES,
    *PARTS,
    *MASKS,
    *SILENT,
    Mutant(
        "N38",
        "the fast path is taken with static arguments: a call without one is that of the call before",
        (
            (
                "        if not (self._to_verify or call.statics or self._closed):",
                "        if not (self._to_verify or self._closed):",
            ),
        ),
        (f"{BETWEEN}test_a_default_is_not_the_static_argument_of_the_call_before",),
        no_gpu="the choice is made on the host",
    ),
    Mutant(
        "N39",
        "leaves of one element may share memory",
        (("        if tensor.numel():", "        if tensor.dim():"),),
        (f"{BETWEEN}test_scalars_that_share_memory_are_refused",),
        no_gpu="leaves are looked at on the host",
    ),
    Mutant(
        "N40",
        "an eager run sees its inputs in other strides than a replay",
        (
            (
                "torch.empty_strided(one.shape, spec.stride, dtype=one.dtype, device=call.device).copy_(one)",
                "torch.empty(one.shape, dtype=one.dtype, device=call.device).copy_(one)",
            ),
        ),
        (f"{BETWEEN}test_an_eager_run_sees_inputs_in_their_strides",),
        no_gpu="the copy is made in the same way",
    ),
    Mutant(
        "N41",
        "writes to a constant are counted from the last lowering on",
        (("        if not self._copied:\n", "        if self._items:\n"),),
        (f"{BETWEEN}test_a_constant_written_before_another_lowering_is_noticed",),
        no_gpu="the count is torch's",
    ),
    Mutant(
        "N42",
        "a constant is the caller's own memory",
        (
            (
                "device, copy=True) for c in self.program.constants]\n",
                "device) for c in self.program.constants]\n",
            ),
        ),
        (f"{BETWEEN}test_a_constant_is_a_copy",),
        no_gpu="a constant that comes from the host is a copy in any case",
    ),
    Mutant(
        "N46",
        "the scale of a loss grows until it is infinite",
        (("        grown = torch.where(grown.isfinite(), grown, self.scale)\n", ""),),
        (
            f"{BETWEEN}test_a_loss_scale_stays_finite[{2.0**127}]",
            f"{BETWEEN}test_a_loss_scale_stays_finite[3e+38]",
        ),
        no_gpu="the same ops",
    ),
    Mutant(
        "N47",
        "an eager run commits to a state that was donated while it ran",
        (
            (
                '        self._check()\n        object.__setattr__(self, "_donor", donor)\n        self._lease',
                "        self._lease",
            ),
        ),
        (f"{BETWEEN}test_an_eager_run_that_loses_its_state_meanwhile_writes_nothing",),
        no_gpu="the check is made on the host",
    ),
    Mutant(
        "N60",
        "a step of a method is kept under the method's name: a copy has that of the original, `super()` replaces it",
        (
            ('f"{self._name} of step {id(self):#x}"', "self._name"),
            (
                "    if own is None or own._of[0] is not instance or own._of[1] is not step:",
                "    if own is None:",
            ),
        ),
        (
            f"{BETWEEN}test_a_copy_of_an_instance_has_a_step_of_its_own",
            f"{BETWEEN}test_super_leads_to_the_step_of_the_parent_and_replaces_none[Tenfold-expected0]",
        ),
        no_gpu="methods are found on the host",
    ),
    Mutant(
        "N61",
        "a module that was copied is not looked at again",
        (("[*originals, *filter(None, ", "[*filter(None, "),),
        (
            f"{LEFT}test_a_module_changed_after_it_was_copied_is_noticed_at_the_next_call[freeze]",
            f"{LEFT}test_a_module_changed_after_it_was_copied_is_noticed_at_the_next_call[attribute of a layer]",
        ),
        no_gpu="modules are compared on the host",
    ),
    Mutant(
        "N62",
        "what a forward leaves below the attributes of its module is not looked at",
        (
            (
                "            left.extend((path + name, below) for name, below in _below(value))",
                "            left.extend((path + name, below) for name, below in _below(value) if not path)",
            ),
        ),
        (
            f"{LEFT}test_what_a_forward_changes_in_place_is_refused_by_name[False-list in list]",
            f"{LEFT}test_what_a_forward_changes_in_place_is_refused_by_name[False-object]",
        ),
        no_gpu="a module's Python runs on the host",
    ),
    Mutant(
        "N63",
        "dicts come back with their keys sorted",
        (("Names(factory, tuple(names), tuple(tree)),", "Names(factory, tuple(names), tuple(names)),"),),
        (
            f"{BETWEEN}test_dicts_come_back_in_the_order_in_which_they_were_put_in",
            f"{BETWEEN}test_gradients_states_and_metrics_are_in_the_order_of_what_went_in",
        ),
        no_gpu="the order is the host's",
    ),
    Mutant(
        "N64",
        "a rate of double parameters is rounded to float32",
        (("Tensor) or params[0].dtype is not torch.float64:\n", "Tensor) or params:\n"),),
        (f"{BETWEEN}test_rates_of_double_parameters_are_double[schedule-adam]",),
        no_gpu="there it is what the op does by itself",
    ),
    Mutant(
        "N75",
        "what a bound method or a partial reads, called by compiled code, is nobody's business",
        (("            if _is_compiled(value):  # what", "            if value is None:  # what"),),
        (
            f"{HOST}test_calls.py::test_what_compiled_callables_read[dict-partial-map]",
            f"{HOST}test_moving.py::test_what_is_taken_is_refused[itertools.repeat(2.0)-next(map(next, [it]))]",
        ),
        no_gpu="the Python of a step runs on the host",
    ),
    Mutant(
        "N76",
        "a class that gets a method is the class that it was",
        (
            (
                "        found = [name for name in {**old, **now} if old.get(name) is not now.get(name)]\n",
                "        found = [name for name in old if now.get(name) not in (None, old[name])]\n",
            ),
        ),
        (
            f"{HOST}test_classes.py::test_row[a length from now on]",
            f"{HOST}test_classes.py::test_row[an equality from now on]",
        ),
        no_gpu="the Python of a step runs on the host",
    ),
    Mutant(
        "N77",
        "a tensor that a module loses, or shares from now on, was copied after all",
        (
            (
                "            yield vars(value)[name], tuple(vars(value)[name])\n",
                "            yield vars(value)[name], tuple(vars(value)[name]) if name == '_modules' else ()\n",
            ),
        ),
        (
            f"{LEFT}test_a_module_changed_after_it_was_copied_is_noticed_at_the_next_call[no bias]",
            f"{LEFT}test_a_module_changed_after_it_was_copied_is_noticed_at_the_next_call[tie]",
        ),
        no_gpu="modules are compared on the host",
    ),
    Mutant(
        "N79",
        "a forward that remembers counts as pure although it goes by what it remembers",
        (("            and computed == again\n", ""),),
        ("tests/test_left_behind.py::test_what_a_forward_goes_by_or_counts_is_refused[other_calls]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N80",
        "a table that a forward makes once may come from anything",
        (("            and runs.sources(made).isdisjoint({*given, *runs.written, _DRAWN})\n", ""),),
        (
            "tests/test_left_behind.py::test_a_table_of_anything_else_is_refused[of an input-an attribute]",
            "tests/test_left_behind.py::test_a_table_of_anything_else_is_refused[drawn-a buffer]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N81",
        "a concatenation is computed in the memory of a value that is overwritten later",
        (("    _copy_into_concatenations(graph)\n", "    pass\n"),),
        (f"{OLD_VALUES}test_a_value_that_is_kept_in_a_concatenation_but_for_a_part[cpu as a GPU-stack]",),
        gpu=(f"{OLD_VALUES}test_a_value_that_is_kept_in_a_concatenation_but_for_a_part[cuda-cat]",),
    ),
    Mutant(
        "N82",
        "what an op may return a view of is taken for a view, and copied once, by the capture",
        (("            and self.out.storage in {var.storage for var in self.inputs()}\n", ""),),
        (
            "tests/test_methods.py::test_a_keyed_function_is_a_function_of_its_key[aten-poisson]",
            "tests/test_methods.py::test_a_keyed_function_is_a_function_of_its_key[aten-dirichlet]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N83",
        "what a function closes over that only a library holds is not found",
        (("dict(self._cells_of(place))", "dict(self._cells_of(place)) if place.root.outlives else {}"),),
        (
            f"{HOST}test_calls.py::test_row[a function that a library alone holds, set aside by the collector]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N84",
        "the value of a buffer that was read on the host is compared on the slow path alone",
        (("Supposed(lowered.program, call.states) if supposes else None", "None"),),
        (
            "tests/test_supposed.py::test_a_checkpoint_with_another_value_is_refused",
            "tests/test_supposed.py::test_another_value_is_refused_wherever_it_comes_from",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N85",
        "a buffer that the step changes may be read on the host",
        (("    recorder.supposed.refuse_written()\n", ""),),
        (
            "tests/test_supposed.py::test_a_buffer_that_the_step_changes_is_not_read[Writes]",
            "tests/test_supposed.py::test_a_buffer_that_the_step_changes_is_not_read[Later]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N86",
        "what an instruction is about to use is unknown to the watch",
        (("*self._evaluation.top(self.frame, ins.offset, count))", "*[UNKNOWN] * count)"),),
        (
            f"{HOST}test_containers.py::test_row[a computed index]",
            f"{HOST}test_moving.py::test_row[next, min, islice]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N87",
        "what a step reads is compared with what it was after the step's own writes",
        (("            if reads.changes_older():", "            if False:"),),
        (
            f"{HOST}test_moving.py::test_what_goes_on_from_call_to_call_is_refused[h.list.append(1)]",
            f"{HOST}test_moving.py::test_exactly_what_goes_on_is_refused",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N88",
        "the strides of a fake result are taken as they are",
        (
            (
                "        out = self._kernels.correct(func, args, kwargs, out)\n",
                "",
            ),
        ),
        (
            "tests/test_kernel_results.py::test_fake_results_lie_as_those_of_the_kernel[batch norm backward-cpu]",
            "tests/test_kernel_results.py::test_fake_results_lie_as_those_of_the_kernel[softplus_backward-cpu]",
        ),
        no_gpu="told on the host",
    ),
    Mutant(
        "N89",
        "results that lie otherwise than traced are left so",
        ((" for var in unsure(instr)),\n", " for var in ()),\n"),),
        ("tests/test_kernel_results.py::test_results_that_lie_otherwise_than_traced_are_laid_out[cpu-aten]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N90",
        "a compiled step reads memory as if the compiler laid values out as torch's kernels do",
        (("laid = None if root in entering else", "laid = None if root is not None else"),),
        ("tests/test_strides.py::test_memory_is_read_as_it_lies_in_an_eager_run[cpu as a GPU-cat of one]",),
        no_gpu="a formula of the compiler, the same on every device",
    ),
    Mutant(
        "N91",
        "what torch.compile made of a part of a step stays compiled in it",
        (("            return inlining(fn, *args, **kwargs)\n", "            return fn(*args, **kwargs)\n"),),
        ("tests/test_is_compiling.py::test_torch_s_compiler_is_out_of_a_step",),
        no_gpu="about functions on the host",
    ),
    Mutant(
        "N92",
        "a call in place becomes one out of place although a view of its memory is read later",
        (("if last_read.get(var, -1) > number}", "if last_read.get(var, -1) > 10**9}"),),
        (
            "tests/properties/test_rewrites.py::test_a_value_that_is_seen_through_a_view_is_still_overwritten[transposed]",
        ),
        no_gpu="a rewriting of the program, the same on every device",
    ),
    Mutant(
        "N93",
        "equal calls are made once although what they read is overwritten in between",
        (("        and touched.isdisjoint(apart)\n", ""),),
        ("tests/properties/test_rewrites.py::test_equal_calls_around_an_overwriting_are_made_twice",),
        no_gpu="a rewriting of the program, the same on every device",
    ),
    Mutant(
        "N94",
        "a compiled step does not notice an index out of range, which a comparison stands for",
        (("            and (index, dim, *shape[dim : dim + 1]) in checked\n", ""),),
        (
            "tests/test_canonical.py::test_a_scatter_whose_index_nobody_checks_is_left_alone",
            "tests/test_canonical.py::test_a_gather_among_more_classes_checks_too_little",
        ),
        no_gpu="a rewriting of the graph, the same on every device",
    ),
    Mutant(
        "N95",
        "what the backward computes again is computed in the forward, and so kept",
        (
            (
                "        later.target = AFTER\n",
                "        later.target = NOW\n        later.args = later.args[:1]\n",
            ),
        ),
        ("tests/test_recompute.py::test_a_compiler_computes_later_what_shall_be_later[cpu]",),
        gpu=("tests/test_recompute.py::test_a_compiler_computes_later_what_shall_be_later[cuda]",),
    ),
    Mutant(
        "N130",
        "what a library's module holds is what it was",
        (
            (
                (
                    "        if self.own and issubclass(type(owner), ModuleType):\n"
                    "            self.reads.of_library(owner, name)\n"
                ),
                "",
            ),
        ),
        (
            f"{HOST}test_names.py::test_row[a function of torch]",
            f"{HOST}test_names.py::test_row[a number of a library]",
        ),
        no_gpu="the Python of a step runs on the host",
    ),
    Mutant(
        "N131",
        "a number, a string, a member of an enum has no attributes",
        (
            (
                "        return not is_value(value) or self.is_of_user(type(value))\n",
                "        return not is_value(value)\n",
            ),
        ),
        (
            f"{HOST}test_attributes.py::test_row[of a number]",
            f"{HOST}test_attributes.py::test_row[of all members]",
        ),
        no_gpu="the Python of a step runs on the host",
    ),
    Mutant(
        "N132",
        "a constant that lies elsewhere in its memory is the constant that it was",
        (
            (
                "            if not one.is_contiguous() or one.nbytes != memory.nbytes():\n",
                "            if False:\n",
            ),
        ),
        ("tests/test_constants.py::test_each_change_is_noticed[0-a later part]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N133",
        "a tensor that a module's plain object holds may lie in other memory",
        (
            (
                '        found[f"values of {name}"] = (count, Same(memory), view)\n',
                '        found[f"values of {name}"] = (count, view)\n',
            ),
        ),
        (f"{FIXED}[other memory]",),
        no_gpu="told on the host",
    ),
    Mutant(
        "N134",
        "the end of a trace empties autocast's cache, under a lock that nobody releases in a child of a fork",
        ((" == 0 and mode.casts_kept:", " == 0:"),),
        ("tests/test_forks.py::test_a_child_does_not_wait_for_the_lock_of_autocast",),
        no_gpu="a forked child has no GPU",
    ),
)
