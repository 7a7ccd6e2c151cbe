"""Mutants of what a second attack found: host reads in other spellings, signals, forks, orders of an optimizer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SILENT"]

HOST = "tests/host/"
CORE = "tests/test_core_graph.py::"
BEFORE = "tests/test_compiled_before.py::"
MODES = "tests/test_kernel_modes.py::"
HALF = "tests/test_half_precision.py::"
SIGNS = "tests/test_signs.py::"
PRODUCTS = "tests/test_cumulative.py::"
CONFIRM = "tests/test_confirm.py::"
TRIAL = "tests/test_trial.py::"
EXACT = "tests/test_exact_programs.py::"
SWEEP = "tests/test_sweep_calls.py::"
NO_GPU = "decided on the host, the same on every device"

SILENT = (
    Mutant(
        "N160",
        "a signal that comes again while it is held back is kept as often: each is a frame more at the end",
        (
            (
                "        if number not in self._waiting:\n",
                "        if True:\n",
            ),
        ),
        ("tests/test_signals.py::test_a_timer_that_strikes_all_the_while_is_answered_once",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N161",
        "a fork does not wait for what another thread imports of torch",
        (("importing = time.monotonic() < latest and bool(imported_elsewhere())", "importing = False"),),
        ("tests/test_forks.py::test_a_fork_waits_for_what_another_thread_imports_of_torch",),
        no_gpu="a forked child has no GPU",
    ),
    Mutant(
        "N162",
        "a method that a class stores anew under the same name is the one that it was",
        (
            (
                "return found if self.mro == new.mro",
                "return [] if self.names == new.names and self.mro == new.mro",
            ),
        ),
        (f"{HOST}test_modules.py::test_row[a forward by another name]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N163",
        "what a step gives to a thread through a queue is no change of the host",
        (('name.startswith(("get", "put"))', 'name.startswith("get")'),),
        (f"{HOST}test_moving.py::test_what_a_step_gives_to_other_threads_is_refused",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N165",
        "a step keeps alive what it found on the way to a value, also after the program has replaced it",
        (("    watched.let_go()\n", ""),),
        (f"{HOST}test_errors.py::test_a_step_keeps_nothing_alive_that_the_program_has_replaced[attribute]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N164",
        "a link that takes gradients may stand behind the learning rate",
        (('if link.role == "direction"]', "if False]"),),
        ("tests/test_optim.py::test_what_takes_gradients_comes_before_the_learning_rate[scale_by_adam]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N166",
        "a row that was copied shows its old values after a write into what it is a row of",
        (("self._writes_to(values) != writes", "False"),),
        ("tests/test_places.py::test_a_copy_never_passes_for_a_view[read after a write]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N167",
        "a write into a row that was copied is lost",
        (
            (
                "            self._owed[storage_key(self._copies[key][0])] = self._lost(func)\n",
                "            self._lost(func)\n",
            ),
        ),
        ("tests/test_places.py::test_a_copy_never_passes_for_a_view[a view of it written]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N168",
        "products that are summed become one product of other rows",
        (("make(_CAT, (list(rights), 0)", "make(_CAT, (list(rights)[::-1], 0)"),),
        ("tests/test_summed_products.py::test_sums_of_products_stay",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N169",
        "products that are summed keep all rows, whatever memory that takes",
        (("    if after - before <= max(_MORE * before, _FEW):", "    if after:"),),
        ("tests/test_summed_products.py::test_no_row_is_kept_that_memory_was_not_there_for",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N170",
        "what a step stores under a key or a name changes nothing that it reads another time",
        (("step.key))\n        self.changed(owner)\n", "step.key))\n"),),
        (
            f"{HOST}test_moving.py::test_what_moves_is_refused[a count of keys, of which each run adds another one]",
        ),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N171",
        "a plan with templates keeps what it was bound to until garbage is looked for",
        (("{name: names.pop(name) for name in", "{name: names[name] for name in"),),
        ("tests/pipelines/test_templates.py::test_a_bound_plan_is_freed_by_reference_counts_alone",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N172",
        "a term of an inner sum is added at the last sum, whatever wrote it in between",
        (
            (
                "        return self._written.isdisjoint(term.storage for term in made.inputs())",
                "        return True",
            ),
        ),
        (
            "tests/test_summed_products.py::test_a_term_that_is_written_before_the_last_product_is_added_as_it_was[False]",
        ),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N173",
        "a cast of products that rounds becomes one of their sum",
        (("(given.dtype, made.dtype) in _WIDER and bool(", "bool("),),
        ("tests/test_summed_products.py::test_products_stay_whose_cast_is_not_that_of_their_sum[int32]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N174",
        "what a step deletes from the front of a list passes if the next is equal",
        (("            self.use(owner)  # all that follows moves up", "            pass"),),
        (f"{HOST}test_moving.py::test_what_is_deleted_from_the_front_is_seen[list-del it[0]]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N178",
        "calls that differ in the strides of a tensor become the same core calls",
        (("        *(tensor.shape, tensor.stride(), ", "        *(tensor.shape, "),),
        (f"{CORE}test_a_core_graph_computes_what_the_graph_does",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N179",
        "calls whose constants are equal in Python, but not to torch, become the same core calls",
        (("(node.target, repr(arguments))", '(node.target, repr(arguments).replace(".0", ""))'),),
        (f"{CORE}test_calls_with_constants_that_are_equal_in_python_are_told_apart[an integer and a float]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N180",
        "a view is what it was before its memory was written",
        (
            (
                "        if view is not None and value.writes != value.memory.writes:",
                "        if view is not None and value.writes < 0:",
            ),
        ),
        (f"{CORE}test_a_core_graph_computes_what_the_graph_does",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N181",
        "memory that is written gets the strides of the op's form that does not write",
        (('        if new.meta["val"].stride() == stride:', "        if True:"),),
        (f"{CORE}test_a_core_graph_computes_what_the_graph_does",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N182",
        "a compiled function is found for arguments that lie elsewhere in their memory",
        ((', "places": places}', "}"),),
        (f"{BEFORE}test_arguments_that_differ_have_other_keys",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N183",
        "a compiled function is found for what an op of the user's was made of before",
        (("of_another_library(target) and composite", "False"),),
        (f"{BEFORE}test_what_its_name_does_not_tell_has_no_key",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N184",
        "a compiled function is found that another version of this library made",
        (('{"sources": _digest(), ', "{"),),
        (f"{BEFORE}test_so_do_options_and_defaults",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N186",
        "a replay takes a dict with its keys in another order",
        (("            if len(order) > 1:\n", "            if False:\n"),),
        (
            "tests/test_key_order.py::test_each_order_gives_what_the_function_gives_or_is_refused[dict-unpacked]",
        ),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N187",
        "a new state may have its keys in another order, which the next call does not see",
        (("    if rows and not agree(recipe, turned):", "    if False and not agree(recipe, turned):"),),
        ("tests/test_key_order.py::test_a_new_state_in_another_order[1]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N188",
        "a step begins without gradients, wherever its function begins with them",
        (
            (
                "    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), call_by_call:",
                "    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False), call_by_call:",
            ),
        ),
        ("tests/test_of_autograd.py::test_a_step_begins_with_gradients_on[no_grad]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N189",
        "gradients are differentiable because declared constants ask for gradients",
        ((" and not is_constant(leaf)", ""),),
        ("tests/test_of_autograd.py::test_declared_constants_make_no_gradient_differentiable",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N190",
        "a compiled step computes in single precision what has half of it",
        (("            node.replace_all_uses_with(rounded, delete", "            _ = dict(delete"),),
        (f"{HALF}test_only_what_rounds_is_rounded",),
        gpu=(f"{HALF}test_what_a_rounding_loses_is_there[cuda-compensated]",),
    ),
    Mutant(
        "N191",
        "a compiled step drops casts to half precision and back",
        (("            node.target = ROUNDED  #", "            pass  #"),),
        (f"{HALF}test_only_what_rounds_is_rounded",),
        gpu=(f"{HALF}test_what_a_rounding_loses_is_there[cuda-fed_back]",),
    ),
    Mutant(
        "N192",
        "a compiled function is found for an op of another library that has changed",
        (('    more["signatures"] = signatures(module.graph)\n', ""),),
        (f"{BEFORE}test_an_op_of_another_library_that_changed_has_another_key",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N195",
        "a mode of torch that is set for a part of a step holds while it is traced, and not in a replay",
        (("        if mode := self._modes.changed(", "        if False and self._modes.changed("),),
        (f"{MODES}test_a_mode_for_a_part_of_a_step_is_refused[ones]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N196",
        "the name, the text or a set of the class of a traced tensor is baked in",
        (("            self.asks_for_type(value)\n", ""),),
        ("tests/test_types_of_tensors.py::test_the_type_of_a_traced_tensor_is_not_asked_for[as text]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N197",
        "a subclass of tensors is placed and copied in as a plain tensor",
        (("    return kind is Tensor or (\n", "    return True or (\n"),),
        ("tests/test_arena.py::test_other_subclasses_are_refused_and_the_advice_works[Doubling]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N198",
        "the calls of an RNN from a key are recorded as they run without the backends that a replay has",
        (("for backend in backends]), _InModes(around):", "for backend in backends]):"),),
        (f"{MODES}test_an_rnn_from_a_key_has_the_bits_of_eager_in_half_precision[LSTM]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N199",
        "a compiled step computes `-x` as Triton does, without the sign of zero",
        (
            (
                "            node.target, node.args = _aten.mul.Tensor, (node.args[0], -1)\n",
                "            pass\n",
            ),
        ),
        (f"{SIGNS}test_negatives_of_floating_point_numbers_are_products",),
        gpu=(f"{SIGNS}test_zeros_have_the_sign_of_eager[cuda-negated]",),
    ),
    Mutant(
        "N200",
        "the gradient of cumprod at a zero leaves out that it is zero",
        (("values.masked_fill(zero | ~between, 1)", "values.masked_fill(~between, 1)"),),
        (f"{PRODUCTS}test_the_gradient_is_that_of_torch",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N201",
        "a compiler runs a write in place in memory with stride 0",
        (("(_overlaps(argument) or _reads_again(call, argument))", "(_reads_again(call, argument))"),),
        (f"{EXACT}test_programs_with_gates_compiled[cpu as a GPU]",),
        gpu=(f"{EXACT}test_programs_with_gates_compiled[cuda]",),
    ),
    Mutant(
        "N202",
        "what waits on the host takes no memory there",
        (("        return max(waiting - host, 0)\n", "        return 0\n"),),
        (f"{TRIAL}test_a_net_in_half_of_the_memory",),
        no_gpu="the plan is made on the host",
    ),
    Mutant(
        "N203",
        "a loss whose targets are computed late takes the memory of its logits twice",
        (
            (
                "if one in needed or free.get(one, end) < end:\n            continue\n",
                "if one in needed or free.get(one, end) < end:\n            continue\n        return False\n",
            ),
        ),
        ("tests/test_parts.py::test_the_gradient_of_a_large_loss_lies_in_the_memory_of_the_logits",),
        no_gpu="told from the graph",
    ),
    Mutant(
        "N204",
        "a capped loss gets the gradient of its cap, whatever the step computes as one",
        (
            (
                "follows = user.target is call.target and user.args[1:] == call.args[1:]",
                "follows = user.target is call.target",
            ),
        ),
        ("tests/test_cross_entropy.py::test_a_cap_gets_it_with_its_own_gradient_alone[other factor]",),
        no_gpu="told from the graph",
    ),
    Mutant(
        "N205",
        "two losses of one product share their targets, whatever they are",
        (
            (
                "return _is_remade(root, self.target) and ignored in (None, self.ignored)",
                "return ignored in (None, self.ignored)",
            ),
        ),
        ("tests/test_cross_entropy.py::test_losses_that_do_not[two targets]",),
        no_gpu="told from the graph",
    ),
    Mutant(
        "N206",
        "the gradient of a smoothed loss lacks what all classes share",
        (("0.0 if self.c == 0.0 else Computed(operator.mul, (self.c, classes))", "0.0"),),
        ("tests/test_cross_entropy.py::test_any_loss_of_rows_gets_them",),
        no_gpu="told from the graph",
    ),
    Mutant(
        "N207",
        "rows of large values are padded, after views of them were taken",
        ((', "comprehensive_padding": False', ""),),
        ("tests/test_turned_values.py::test_no_row_is_padded",),
        no_gpu="read from what the compiler writes",
    ),
    Mutant(
        "N208",
        "values that share memory come back from the host apart, and a write to one no longer shows in the others",
        (
            (
                "blocks[storage_key(one)], one.storage_offset()",
                "blocks[storage_key(one)].clone(), one.storage_offset()",
            ),
        ),
        ("tests/test_trial.py::test_views_of_one_storage_come_back_as_such[cpu]",),
        no_gpu="the trial alone would see it",
    ),
    Mutant(
        "N209",
        "functions of packages that are installed in the environment are not followed",
        (
            (
                "    if not is_user_file(filename):\n        return None if",
                '    if filename.startswith(sysconfig.get_paths()["platstdlib"]):\n        return None if',
            ),
        ),
        (f"{HOST}test_names.py::test_row[a function of an installed package]",),
        no_gpu="Python alone is followed",
    ),
    Mutant(
        "N210",
        "nothing of a copy is followed, not even what the user's own code does for it",
        (
            (
                "return self.copies and not any(map(self.owned, inner))",
                "return self.copies and not self.owned(frame)",
            ),
        ),
        (f"{HOST}test_calls.py::test_row[what a copy with help reads]",),
        no_gpu="Python alone is followed",
    ),
    Mutant(
        "N211",
        "a part of a value is replaced in place by another part of the same memory",
        (("(_overlaps(argument) or _reads_again(call, argument))", "(_overlaps(argument))"),),
        (f"{EXACT}test_programs_with_gates_compiled[cpu as a GPU]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N212",
        "a compiled step is compared on the values of its first batch alone",
        (
            (
                "        for kind in (*KINDS, OVERFLOW) if half else KINDS:",
                "        for kind in ():",
            ),
        ),
        (f"{TRIAL}test_what_the_first_batch_does_not_show_is_found_in_the_first_call[cpu as a GPU-counted]",),
        no_gpu="the trial is the same on every device",
    ),
    Mutant(
        "N213",
        "a compiled step is compared in its first call alone",
        (("        if self._calls != self._due:\n", "        if True:\n"),),
        (f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cpu]",),
        no_gpu="the trial is the same on every device",
    ),
    Mutant(
        "N214",
        "a result of another dtype than that of eager becomes a leaf",
        (
            (
                "        if rows:\n            raise miscompiled(\n",
                "        if False:\n            raise miscompiled(\n",
            ),
        ),
        (f"{TRIAL}test_a_result_of_another_dtype_is_refused_before_anything_counts",),
        no_gpu="told from the trace",
    ),
    Mutant(
        "N219",
        "counters of micro-batches are summed",
        (
            (
                "        if position not in handed and not (leaf.is_floating_point() or leaf.is_complex())\n",
                "        if leaf is None\n",
            ),
        ),
        ("tests/test_autodiff.py::test_whole_numbers_are_refused_and_the_advice_works[count-1]",),
        no_gpu="told from the trace",
    ),
    Mutant(
        "N220",
        "all micro-batches draw from a key that the loss closes over",
        (("                _refuse_shared(name, drawn, used)\n", ""),),
        (
            "tests/test_autodiff.py::test_a_key_that_is_closed_over_is_refused_and_the_advice_works[drawn-False]",
        ),
        no_gpu="told from the trace",
    ),
    Mutant(
        "N226",
        "all micro-batches of a pipeline draw from a key that the loss closes over",
        (("            if several:\n                _refuse_shared(name, tape, used)\n", ""),),
        ("tests/pipelines/test_mistakes.py::test_a_key_that_the_loss_closes_over_is_refused[as it is]",),
        no_gpu="told from the trace",
    ),
    Mutant(
        "N221",
        "a checkpoint is copied into the memory of one that is being written",
        (("        stage, self._stage = self._stage, Stage()\n", "        stage = self._stage\n"),),
        ("tests/test_checkpoints.py::test_a_save_in_the_middle_of_a_save_leaves_both_whole",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N222",
        "two threads save by one object at one time",
        (
            (
                "        self._turn = threading.RLock()\n",
                '        self._turn: Any = __import__("contextlib").nullcontext()\n',
            ),
        ),
        ("tests/test_checkpoints.py::test_threads_that_save_at_one_time_save_whole_checkpoints",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N223",
        "a file is loaded whatever its checksum says",
        (("    if kept is None or kept[1].decode() != found.hexdigest():\n", "    if kept is None:\n"),),
        ("tests/test_checkpoint.py::test_each_flipped_bit_of_a_file_is_found",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N224",
        "what a killed save has left stays beside the file",
        (("        _remove_left(target, whole=shard_bytes is not None)  # without an index\n", ""),),
        ("tests/test_checkpoint.py::test_what_a_killed_save_left_goes_and_what_another_writes_stays",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N225",
        "a file that is being written is taken for one that was left",
        (("    lock(file.fileno(), wait=True)\n", ""),),
        ("tests/test_checkpoint.py::test_a_file_is_locked_until_it_has_its_name",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N227",
        "a later comparison of a recorded program goes by the distances of an earlier one",
        (("        self._measure(())\n", ""),),
        (
            f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cpu as graphs]",
        ),
        no_gpu="a graph has its outputs from when it is recorded",
    ),
    Mutant(
        "N228",
        "after a refused call the state is the one that a comparison was recorded with",
        (("            space.keep()\n            return reference", "            return reference"),),
        (
            f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cpu as graphs]",
        ),
        gpu=(
            f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cuda]",
        ),
    ),
    Mutant(
        "N229",
        "a later comparison reads a copy of the distances of the first one",
        (
            (
                "        self.measure()\n        table",
                (
                    "        self.measure()\n"
                    "        self._measured = [(n, one.clone()) for n, one in self._measured]\n        table"
                ),
            ),
        ),
        (
            f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cpu as graphs]",
        ),
        gpu=(
            f"{TRIAL}test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts[4-cuda]",
        ),
    ),
    Mutant(
        "N230",
        "a call may write elements that it reads for others",
        (("            raise self._reads_what_it_writes(func)\n", "            pass\n"),),
        (
            "tests/refusals/test_tensors.py::test_a_call_that_reads_elements_that_it_writes_for_others[shift_columns]",
        ),
        no_gpu="it is refused in the trace",
    ),
    Mutant(
        "N231",
        "flags that are asserted may be computed from anything",
        (
            (
                "asserts = any(checked.get(var.storage, False) for var in made)",
                "asserts = any(checked.get(var.storage, False) and not _is_position(instr, var) for var in made)",
            ),
        ),
        ("tests/test_unchecked.py::test_what_may_hold_any_value[what is asserted]",),
        no_gpu="it is found in the program",
    ),
    Mutant(
        "N232",
        "the compiler reorders reads of what a foreign op has written over",
        ((', "reorder_for_peak_memory": False}\n)\n', "}\n)\n"),),
        ("tests/test_old_values.py::test_what_is_added_to_a_value_is_there_for_all_that_read_the_sum[cpu]",),
        no_gpu="torch's kernels for a host are ordered so",
    ),
    Mutant(
        "N233",
        "a perturbed run moves numbers out of the range that a call checks",
        (("    low, high = bounds\n", "    return value\n"),),
        ("tests/test_unchecked.py::test_what_a_call_checks_is_perturbed_within_its_bounds[4e-07-direct]",),
        no_gpu="an assertion that fails there ends the run",
    ),
    Mutant(
        "N234",
        "a loss of differences overflows later than its kernel",
        (("each(_rounded(x - target).abs(), kept,", "each((x - target).abs(), kept,"),),
        (
            "tests/test_half_precision.py::test_numbers_and_dtypes_are_those_of_torchs_kernels[cpu-of_differences]",
        ),
        gpu=(
            "tests/test_half_precision.py::test_numbers_and_dtypes_are_those_of_torchs_kernels[cuda-of_differences]",
        ),
    ),
    Mutant(
        "N235",
        "strides that a compiled function asserts are no reason to refuse a step",
        (
            (
                "    except AssertionError as error:\n        raise _gave_up",
                "    except LookupError as error:\n        raise _gave_up",
            ),
        ),
        (
            "tests/test_stages.py::test_a_compiled_step_finds_out_that_an_op_returns_other_strides_than_it_says",
        ),
        no_gpu="the ops that torch's trace is known to be wrong about have kernels for a host",
    ),
    Mutant(
        "N236",
        "torch's cache finds loops that were written for vectors of another CPU",
        (("_for_this_cpu() if on_host else contextlib.nullcontext():", "contextlib.nullcontext():"),),
        ("tests/test_compiler.py::test_a_step_is_found_again_unless_our_functions_or_the_cpu_changed",),
        no_gpu="its kernels are found by the GPU's name",
    ),
    Mutant(
        "N237",
        "a quotient of halves is rounded once, at its end",
        (
            (
                "(lambda result: ROUNDED(result, dtype)) if dtype in HALF else",
                "(lambda result: result) if dtype in HALF else",
            ),
        ),
        ("tests/test_division.py::test_in_half_precision[cpu-dtype1]",),
        gpu=("tests/test_division.py::test_in_half_precision[cuda-dtype3]",),
    ),
    Mutant(
        "N238",
        "a choice between what a formula has computed returns what was not rounded",
        (
            (
                'elif not node.meta.get("result") or _is_exact(node) or',
                'elif not node.meta.get("result") or node.target in _EXACT or',
            ),
        ),
        ("tests/test_half_precision.py::test_what_a_rounding_loses_is_there[cpu-chosen]",),
        gpu=("tests/test_half_precision.py::test_what_a_rounding_loses_is_there[cuda-chosen]",),
    ),
    Mutant(
        "N239",
        "a remainder's divisor without dimensions is read as it is",
        (("        other = other.to(value.dtype)\n", "        pass\n"),),
        ("tests/test_half_precision.py::test_what_a_rounding_loses_is_there[cpu-chosen]",),
        no_gpu="kernels of a GPU, and their formulas, read it in half precision in any case",
    ),
    Mutant(
        "N240",
        "a step that was found wrong goes on where it is not compared",
        (("        _refuse_refuted(self._lowered)\n", ""),),
        (f"{TRIAL}test_a_step_that_was_found_wrong_stays_refused[2]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N241",
        "a host value that has changed is taken over, whatever the step does with it",
        (
            (
                "        if difference := another_program(self._program, program):\n",
                "        if difference := None:\n",
            ),
        ),
        (f"{CONFIRM}test_a_step_goes_on_exactly_as_long_as_it_does_the_same",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N242",
        "two traces are compared by their calls, and not by what they make the new state",
        (
            (
                "in leaves if not _same(a, b)]:\n        return Difference(moved)",
                "in ()]:\n        return Difference(moved)",
            ),
        ),
        (f"{CONFIRM}test_what_leaves_a_step_by_another_way_is_another_program[new state]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N243",
        "what was found of an order of keys is taken to hold under other host values",
        (("            lowered.orders.clear()", "            pass"),),
        (f"{CONFIRM}test_an_order_of_keys_is_looked_at_again",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N244",
        "what a step returns as it is was not read",
        (("                reads.returned(result)\n", "                pass\n"),),
        (
            "tests/host/test_results.py::test_row[a dict]",
            "tests/host/test_results.py::test_row[an object that another one takes the place of]",
        ),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N245",
        "a number of each member counts as a vector when dtypes are promoted",
        (("if dtype is not None else {}\n\n        def act", "if False else {}\n\n        def act"),),
        (f"{SWEEP}test_a_number_of_each_member_promotes_as_that_of_one",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N246",
        "a gradient that is taken of a sweep is zero",
        (("    if torch.is_grad_enabled() and any(tensor.requires", "    if False and any(tensor.requires"),),
        (f"{SWEEP}test_what_would_be_lost_is_refused[its gradient]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N247",
        "calls for all members are cast again by an autocast around the sweep",
        (("            modes.enter_context(torch.autocast(device, enabled=False))\n", "            pass\n"),),
        (f"{SWEEP}test_autocast_around_a_sweep_casts_once",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N248",
        "a view that is taken of one member after another is a copy, and what is written into it is lost",
        (
            (
                " - {var.storage for var in call.writes}) & self._written:",
                " - {var.storage for var in call.writes}) & set():",
            ),
        ),
        (f"{SWEEP}test_what_would_be_lost_is_refused[a write into a view without a rule]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N249",
        "infinities that the code writes count as the first fault",
        (("            elif purpose and not (has_nan or come_from):\n", "            elif False:\n"),),
        ("tests/test_nonfinite.py::test_the_first_call_is_named[a softmax over -inf alone-aten-cpu]",),
        no_gpu="a tool that runs call by call",
    ),
    Mutant(
        "N250",
        "what came in with NaN is the fault of the first call that reads it",
        (("                self._from[var.storage] = frozenset({-1})\n", "                pass\n"),),
        ("tests/test_nonfinite.py::test_a_leaf_that_is_not_finite_before_is_named",),
        no_gpu="a tool that runs call by call",
    ),
    Mutant(
        "N251",
        "a run is made again without what the loop has edited between two calls",
        (("        return number, state._generation == generation\n", "        return number, True\n"),),
        ("tests/test_recorder.py::test_what_the_loop_edits_comes_again",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N252",
        "recorded inputs are the memory of the loop, which writes the next batch there",
        (("            return memory.copy_(tensor, non_blocking=True)\n", "            return tensor\n"),),
        ("tests/test_recorder.py::test_each_call_of_the_recording_comes_again",),
        no_gpu="copies to the host are the same code",
    ),
    Mutant(
        "N253",
        "a product that may round to TF32 takes the place of a convolution that may not",
        (("    rounds = cuda.fp32_precision == ", "    rounds = False and cuda.fp32_precision == "),),
        ("tests/test_convolutions.py::test_a_product_in_tf32_takes_no_convolution_that_may_not_round",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N260",
        "what a checkpoint holds of a part beyond the leaves is left out without a word",
        (("        if name not in taken and any(", "        if not wanted and any("),),
        ("tests/test_checkpoint_parts.py::test_both_sides_are_listed",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N261",
        "a leaf of a part without a value keeps its own",
        (
            (
                "    lost = [row for name, row in missing.items() if wanted[name][1] not in tied]\n",
                "    lost: list[str] = []\n",
            ),
        ),
        ("tests/test_checkpoint_parts.py::test_both_sides_are_listed",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N262",
        "values of another dtype are cast, whether asked for or not",
        (("and not (cast and all(shapes)", "and not (all(shapes)"),),
        ("tests/test_checkpoint_parts.py::test_another_dtype_needs_a_word",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N263",
        "of several files, one that does not hold what the index says is read",
        (("        if names is not None and held.keys() != names:\n", "        if names == set():\n"),),
        ("tests/test_checkpoint_parts.py::test_a_folder_that_is_not_whole_is_refused",),
        no_gpu="it happens on the host",
    ),
    Mutant(
        "N264",
        "rows of a leaf are written in place although what is written reads that leaf, or another one that is",
        (("            one not in apart and last.get(", "            last.get("),),
        ("tests/test_rows_in_place.py::test_the_bits_are_those_of_a_copy",),
        no_gpu="the schedule is made on the host",
    ),
    Mutant(
        "N265",
        "rows of a leaf are written at indices that nobody checked before",
        (
            ("    check_replacements(program)\n", ""),
            ("        if not any(may_raise(instr, makers) for instr in chain):", "        if chain:"),
        ),
        (
            "tests/test_rows_in_place.py::test_an_index_out_of_bounds_leaves_the_state_as_it_is[False-index_add]",
        ),
        no_gpu="a kernel of the device raises when the context is lost",
    ),
    Mutant(
        "N266",
        "rows of a leaf are written in place although the step returns the new leaf, too",
        (("                or any(one.writes != (at,) for one in own)\n", ""),),
        ("tests/test_rows_in_place.py::test_the_bits_are_those_of_a_copy",),
        no_gpu="the schedule is made on the host",
    ),
)
