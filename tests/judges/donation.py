"""What JAX's tests of donation mean, re-expressed: a state is donated to each call of a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import functional_cg as fcg
from tests.judges.rows import Verdict
from tests.judges.scenarios import Scenarios, left_out, raises, same

__all__ = ["DONATION"]


def _state(device: str) -> Any:
    return fcg.place({"w": torch.arange(4.0, device=device), "b": {"c": torch.ones(2, device=device)}})


def _add(state: Any, x: Any) -> Any:
    return {"w": state["w"] + x, "b": {"c": state["b"]["c"] * 2}}, {"sum": state["w"].sum()}


def donated_input_is_invalid(lowering: str, device: str) -> Iterator[Verdict]:
    state, x = _state(device), torch.ones(4, device=device)
    step = fcg.graph_step(_add, lowering=lowering)
    new, _ = step(state, x)
    yield raises(fcg.DonatedStateError, lambda: state["w"] + 1, "read after donation")
    yield raises(fcg.DonatedStateError, lambda: state["b"]["c"] + 1, "every leaf of a nested tree")
    yield raises(fcg.DonatedStateError, lambda: state["w"].cpu().numpy(), "as an array")
    yield raises(fcg.DonatedStateError, lambda: state["w"].to(torch.float64), "as another dtype")
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device) + 1)


def donated_twice(lowering: str, device: str) -> Iterator[Verdict]:
    state, x = _state(device), torch.ones(4, device=device)
    step = fcg.graph_step(_add, lowering=lowering)
    new, _ = step(state, x)
    yield raises(fcg.DonatedStateError, lambda: step(state, x), "to the same step")
    other = fcg.graph_step(lambda state: (state, {}), lowering=lowering)
    yield raises(fcg.DonatedStateError, lambda: other(state), "to another step")
    new, _ = step(new, x)
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device) + 2, "the new state is valid")


def donated_and_passed_as_an_input(lowering: str, device: str) -> Iterator[Verdict]:
    state = _state(device)
    step = fcg.graph_step(_add, lowering=lowering)
    new, _ = step(state, state["w"])
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device) * 2, "the input is a copy")


def two_leaves_are_one_tensor(lowering: str, device: str) -> Iterator[Verdict]:
    del lowering
    one = torch.ones(3, device=device)
    yield raises(fcg.AliasError, lambda: fcg.place({"a": one, "b": one}), "the same tensor")
    yield raises(fcg.AliasError, lambda: fcg.place({"a": one, "b": one[:2]}), "a view of it")


def donation_that_cannot_be_used(lowering: str, device: str) -> Iterator[Verdict]:
    def other_shape(state: Any) -> Any:
        return {"w": state["w"][:2]}, {}

    def other_dtype(state: Any) -> Any:
        return {"w": state["w"].double()}, {}

    def a_leaf_less(state: Any) -> Any:
        return {}, {}

    for function in (other_shape, other_dtype, a_leaf_less):
        state = fcg.place({"w": torch.ones(4, device=device)})
        step = fcg.graph_step(function, lowering=lowering)
        yield raises(fcg.LayoutError, partial(step, state), function.__name__)
        yield from same(fcg.snapshot(state)["w"], torch.ones(4, device=device), "the state is still valid")


def inputs_that_are_not_donated_stay(lowering: str, device: str) -> Iterator[Verdict]:
    x = torch.ones(4, device=device)
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x}, {"x": x.mul_(3)}), lowering=lowering)
    state = fcg.place({"w": torch.zeros(4, device=device)})
    for _ in range(3):
        state, metrics = step(state, x)
        yield from same(metrics["x"], torch.full((4,), 3.0, device=device))
        yield from same(x, torch.ones(4, device=device), "the input is unchanged")


def outputs_are_not_the_donated_memory(lowering: str, device: str) -> Iterator[Verdict]:
    def step_of(state: Any) -> Any:
        return {"w": state["w"] + 1, "v": state["w"]}, {"w": state["w"], "view": state["w"][1:]}

    step = fcg.graph_step(step_of, lowering=lowering)
    state = fcg.place({"w": torch.zeros(3, device=device), "v": torch.zeros(3, device=device)})
    kept = []
    for _ in range(4):
        state, metrics = step(state)
        kept.append(metrics)
    for call, metrics in enumerate(kept):
        yield from same(metrics["w"], torch.full((3,), float(call), device=device), f"kept from call {call}")
        yield from same(
            metrics["view"], torch.full((2,), float(call), device=device), f"a view of call {call}"
        )
    yield from same(fcg.snapshot(state)["v"], torch.full((3,), 3.0, device=device), "a leaf that moves")


def leaves_exchanged(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_step(lambda state: ({"a": state["b"], "b": state["a"]}, {}), lowering=lowering)
    state = fcg.place({"a": torch.zeros(3, device=device), "b": torch.ones(3, device=device)})
    for call in range(4):
        state, _ = step(state)
        yield from same(fcg.snapshot(state)["a"], torch.full((3,), float((call + 1) % 2), device=device))


def one_value_in_two_leaves(lowering: str, device: str) -> Iterator[Verdict]:
    def step_of(state: Any) -> Any:
        new = state["a"] + state["b"]
        return {"a": new, "b": new}, {}

    step = fcg.graph_step(step_of, lowering=lowering)
    state = fcg.place({"a": torch.ones(3, device=device), "b": torch.ones(3, device=device)})
    for call in range(3):
        state, _ = step(state)
        for name in "ab":
            yield from same(fcg.snapshot(state)[name], torch.full((3,), 2.0 ** (call + 1), device=device))


def identity_donates(lowering: str, device: str) -> Iterator[Verdict]:
    state = _state(device)
    step = fcg.graph_step(lambda state: (state, {}), lowering=lowering)
    new, _ = step(state)
    yield raises(fcg.DonatedStateError, lambda: state["w"] + 1, "the state that was passed in")
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device))


def donation_by_keyword(lowering: str, device: str) -> Iterator[Verdict]:
    state, x = _state(device), torch.ones(4, device=device)
    step = fcg.graph_step(_add, lowering=lowering)
    new, _ = step(state, x=x)
    yield raises(fcg.DonatedStateError, lambda: state["w"] + 1, "read after donation")
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device) + 1)


def static_and_donated(lowering: str, device: str) -> Iterator[Verdict]:
    def call() -> Any:
        step = fcg.graph_step(_add, lowering=lowering, static_argnames=("state",))
        return step(_state(device), torch.ones(4, device=device))

    yield raises(Exception, call, "the state is a static argument")


def options_of_jit(lowering: str, device: str) -> Iterator[Verdict]:
    del device
    for option in ({"donate_argnums": 0}, {"donate_argnames": ("state",)}):
        yield raises(
            TypeError,
            lambda option=option: fcg.graph_step(_add, lowering=lowering, **option),
            next(iter(option)),
        )


def static_arguments_beside_the_donated(lowering: str, device: str) -> Iterator[Verdict]:
    def step_of(state: Any, x: Any, scale: int) -> Any:
        return {"w": state["w"] + scale * x}, {}

    step = fcg.graph_step(step_of, lowering=lowering, static_argnames=("scale",))
    state, x = fcg.place({"w": torch.zeros(2, device=device)}), torch.ones(2, device=device)
    for scale in (2, 3, 2):
        old, (state, _) = state, step(state, x, scale=scale)
        yield raises(fcg.DonatedStateError, lambda old=old: old["w"] + 1, f"after a call with scale={scale}")
    yield from same(fcg.snapshot(state)["w"], torch.full((2,), 7.0, device=device))


def lowering_does_not_donate(lowering: str, device: str) -> Iterator[Verdict]:
    state, x = _state(device), torch.ones(4, device=device)
    step = fcg.graph_step(_add, lowering=lowering)
    step.lower(state, x)
    yield from same(fcg.snapshot(state)["w"], torch.arange(4.0, device=device), "after `lower`")
    new, _ = step(state, x)
    yield from same(fcg.snapshot(new)["w"], torch.arange(4.0, device=device) + 1)


def nested_donation(lowering: str, device: str) -> Iterator[Verdict]:
    inner = fcg.graph_step(lambda state: ({"w": state["w"] ** 2}, {}), lowering=lowering)

    def outer_of(state: Any) -> Any:
        new, _ = inner(state)
        return new, {"old": state["w"].sum()}

    outer = fcg.graph_step(outer_of, lowering=lowering)
    state = fcg.place({"w": torch.full((2,), 3.0, device=device)})
    new, metrics = outer(state)
    yield from same(fcg.snapshot(new)["w"], torch.full((2,), 9.0, device=device))
    yield from same(metrics["old"], torch.tensor(6.0, device=device), "inside, nothing is donated")


def an_error_donates_nothing(lowering: str, device: str) -> Iterator[Verdict]:
    def fails(state: Any, x: Any) -> Any:
        raise ValueError("of the user")

    state, x = _state(device), torch.ones(4, device=device)
    yield raises(
        ValueError, lambda: fcg.graph_step(fails, lowering=lowering)(state, x), "an error of the user"
    )
    step = fcg.graph_step(_add, lowering=lowering)
    step.lower(state, x)
    yield raises(
        fcg.LayoutError, lambda: (step(fcg.fork(state), x), step(state, x[:2])), "a batch of another shape"
    )
    yield from same(fcg.snapshot(state)["w"], torch.arange(4.0, device=device), "the state is still valid")


def a_copy_is_not_donated(lowering: str, device: str) -> Iterator[Verdict]:
    state, x = _state(device), torch.ones(4, device=device)
    fork, taken = fcg.fork(state), fcg.snapshot(state)
    step = fcg.graph_step(_add, lowering=lowering)
    state, _ = step(state, x)
    yield from same(fcg.snapshot(fork)["w"], torch.arange(4.0, device=device), "a fork")
    yield from same(taken["w"], torch.arange(4.0, device=device), "a snapshot")
    fork, _ = step(fork, x)
    yield from same(fcg.snapshot(fork)["w"], fcg.snapshot(state)["w"], "both go the same way")


def a_read_only_function_does_not_donate(lowering: str, device: str) -> Iterator[Verdict]:
    state = _state(device)
    read = fcg.graph_fn(lambda state: state["w"] * 2, lowering=lowering)
    for _ in range(2):
        yield from same(read(state), torch.arange(4.0, device=device) * 2)
    yield from same(fcg.snapshot(state)["w"], torch.arange(4.0, device=device), "the state is still valid")


DONATION = Scenarios(
    "JAX donation",
    (
        donated_input_is_invalid,
        donated_twice,
        donated_and_passed_as_an_input,
        two_leaves_are_one_tensor,
        donation_that_cannot_be_used,
        inputs_that_are_not_donated_stay,
        outputs_are_not_the_donated_memory,
        leaves_exchanged,
        one_value_in_two_leaves,
        identity_donates,
        donation_by_keyword,
        static_and_donated,
        options_of_jit,
        static_arguments_beside_the_donated,
        lowering_does_not_donate,
        nested_donation,
        an_error_donates_nothing,
        a_copy_is_not_donated,
        a_read_only_function_does_not_donate,
        left_out("test_jit_donate_weak_type", why="torch has no weak types"),
        left_out(
            "test_donate_argnames_signature_fail",
            "test_specify_donate_argnums_and_argnames",
            "test_donate_argnames_with_args",
            "test_donate_args_info_aot",
            why="what is donated is not chosen: always the first argument",
        ),
        left_out(
            "test_pmap_donate_argnums_invalidates_input",
            "test_device_put_on_multi_device_donated_buffer_fails",
            "testBufferDonationWithOutputShardingInference",
            why="needs several devices: tests/sharding",
        ),
        left_out(
            "test_no_donation_across_memory_kinds",
            "test_mem_kind_donation_pinned_host",
            "test_compute_offload_with_donation",
            why="a state has one kind of memory; `sleep` and `wake` move it as a whole",
        ),
    ),
)
