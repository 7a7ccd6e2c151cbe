"""Mutants of sharding; their tests run in several processes with gloo."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SHARDED"]

SHARDING = "tests/sharding/"
SEVERAL = "it takes several GPUs; the same tests run there, `-m multi_gpu`"

SHARDED = (
    Mutant(
        "N21",
        "a rank captures without asking whether the others capture the same",
        (('    mesh.ranks.agree(function, "\\n".join(lines))\n', ""),),
        (
            f"{SHARDING}test_collective_calls.py::test_h95_layouts_and_functions_that_differ_are_refused[gloo]",
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N22",
        "a checkpoint of one rank's shards only",
        (
            (
                "            full = all_of(leaf) if isinstance(leaf, Sharded) else owned(leaf)\n",
                (
                    "            full = owned(leaf.local if isinstance(leaf, Sharded) else leaf)\n"
                    "            if isinstance(leaf, Sharded) and leaf.placement.sharded:\n"
                    "                full = leaf.placement.unpad(full.repeat(leaf.placement.mesh.shards.size))\n"
                ),
            ),
        ),
        (f"{SHARDING}test_state_dict.py::test_a_module_goes_in_and_comes_back[gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N23",
        "gradients are summed over ranks and not averaged",
        (
            (
                "        return (out / mesh.size).to(dtype or self.variable.dtype)\n",
                "        return out.to(dtype or self.variable.dtype)\n",
            ),
        ),
        (f"{SHARDING}test_oracle.py::test_slices_train_as_the_whole_batch_does[gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N24",
        "what was gathered is kept, and shown again after the next update",
        (
            (
                '    return cast("T", pytree.unflatten(treedef, out))\n',
                (
                    "    out = [leaf.clone() for leaf in gather.__dict__.setdefault(str(treedef), out)]\n"
                    '    return cast("T", pytree.unflatten(treedef, out))\n'
                ),
            ),
        ),
        (f"{SHARDING}test_state_dict.py::test_what_is_gathered_is_that_of_now[gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N25",
        "a leaf that all ranks hold whole takes whatever each rank computes",
        (
            (
                "    differs, own_data = _on_all_stages(program, specs, names, mesh, others)\n",
                "    differs, own_data = dict.fromkeys, _on_all_stages(program, specs, names, mesh, others)[1]\n",
            ),
        ),
        (
            (
                f"{SHARDING}test_replicas.py::"
                "test_running_statistics_of_a_slice_are_refused_and_their_mean_is_taken[gloo]"
            ),
        ),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N26",
        "padding takes part in reductions of a leaf",
        (("        if not (self.sharded and self.padded):\n", "        if local is not None:\n"),),
        (f"{SHARDING}test_placements.py::test_masking_keeps_what_is_on_one_rank_alone",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N27",
        "a rank alone may ask for the norm of a sharded leaf outside of a step",
        (
            (
                " and leaf.placement.at_rest and leaf.placement.mesh.everyone > 1:\n",
                " and leaf is None:\n",
            ),
        ),
        (f"{SHARDING}test_misuse.py::test_mistake_is_refused_and_its_repair_works[gloo]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N215",
        "the end of a process group waits for a capture for ever",
        (("            for ending in _endings():\n", "            for ending in ():\n"),),
        (f"{SHARDING}test_endings.py::test_a_group_that_waits_for_a_capture_ends[destroy-all]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N216",
        "the end of a process group frees what it does not wait for",
        (
            (
                "            ended = groups if everyone else {ending.group_name}.intersection(groups)\n",
                "            ended = groups\n",
            ),
        ),
        (f"{SHARDING}test_endings.py::test_a_group_that_waits_for_a_capture_ends[destroy-one]",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N217",
        "a step whose process groups have ended replays a graph that is gone",
        (
            (
                "        if not self.unchanged():\n            raise gone(",
                "        if False:\n            raise gone(",
            ),
        ),
        (f"{SHARDING}test_endings.py::test_a_step_whose_groups_have_ended_is_refused",),
        no_gpu=SEVERAL,
    ),
    Mutant(
        "N218",
        "a collective of any backend is captured",
        (("            if backend in _CAPTURED:\n", '            if backend in (*_CAPTURED, "gloo"):\n'),),
        (f"{SHARDING}test_endings.py::test_a_collective_that_cannot_be_captured_is_refused[gloo]",),
        no_gpu=SEVERAL,
    ),
)
