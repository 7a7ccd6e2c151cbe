"""A sample of the outside judges, and what their comparison finds. ``python -m tests.judges`` runs the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import functional_cg as fcg
from tests.judges.document import page
from tests.judges.judges import JUDGES
from tests.judges.pool import Worker
from tests.judges.rows import Row, Verdict, compare
from tests.judges.scenarios import Scenarios, raises
from tests.shares import share

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (X.double(), "is float64[2, 3], expected float32[2, 3]"),
        (X[:1], "is float32[1, 3], expected float32[2, 3]"),
        (X.T.contiguous().T, "strides (1, 2), expected (3, 1)"),
        (X.where(X != 6, torch.nan), "inf or NaN in other places"),
        (X.where(X != 6, torch.inf), "inf or NaN in other places"),
        (X + 1e-3, "values differ by 1.0e-03, rounding explains 1.1e-05"),
    ],
    ids=["dtype", "shape", "strides", "nan", "inf", "values"],
)
def test_the_comparison_finds_what_differs(got: torch.Tensor, why: str) -> None:
    verdict = compare(got, X)
    assert verdict.outcome == "DIFFERS"
    assert verdict.why.startswith(why)


def test_the_comparison_tells_bits_from_roundings() -> None:
    assert compare(X.clone(), X).outcome == "equal"
    assert compare(X.new_zeros(2).neg(), X.new_zeros(2)).outcome == "rounded", "a negative zero"
    assert compare(X * (1 + 2e-7), X).outcome == "rounded"
    # The eager run itself is off by 1e-3, so that a step may be.
    assert compare(X + 1e-3, X, exact=lambda: X.double() - 1e-3).outcome == "rounded"
    assert compare(X.long() + 1, X.long()).outcome == "DIFFERS"
    # A view with gaps and an expanded result get memory of their own.
    assert compare(X[:, :2].clone(), X[:, :2]).outcome == "equal"
    assert compare(X[:1].expand(2, 3).contiguous(), X[:1].expand(2, 3)).outcome == "equal"


def test_the_page_has_every_reason() -> None:
    rows = [
        Row("OpInfo", "sin", "aten", "cpu", "2").add(
            [Verdict("equal"), Verdict("DIFFERS", "float32[0]", "off")]
        ),
        Row("OpInfo", "cos", "aten", "cpu", "2").add([Verdict("refused", "float32[0]", "no | yes")]),
    ]
    text = page(rows, {("OpInfo", "2"): 700})
    assert "| OpInfo | cpu | 2 | aten | 2 of 700 | 0 (1) | 0 (0) | 0 (0) | 0 (0) | 1 (1) | 1 (1) |" in text
    assert "| OpInfo | off | `sin float32[0]` | everywhere |" in text
    assert "| OpInfo | no \\| yes | `cos` | everywhere |" in text


def test_the_page_names_few_cases_of_a_reason() -> None:
    rows = [
        Row("OpInfo", f"op {number}", "aten", device, "2").add(
            [Verdict("refused", "", f"off by {number}e-3")]
        )
        for number, device in enumerate(["cpu"] * 9 + ["cuda"])
    ]
    rows.append(
        Row("OpInfo", "left out: no", "aten", "cpu", "2").add([Verdict("not run", "a test", "a test: no")])
    )
    text = page(rows, {})
    named = ", ".join(f"`op {number}`" for number in range(6))
    assert f"| OpInfo | off by 0e-3 | {named} and 4 more | everywhere |" in text
    assert "| OpInfo | no | `a test` | cpu aten |" in text


def test_what_cancels_is_as_far_as_its_terms_round() -> None:
    residue, other = torch.tensor([2e-17, -3e-17]), torch.tensor([4e-17, 1e-17])
    assert compare(residue, other).outcome == "DIFFERS"
    assert compare(residue, other, near=lambda: other * -1).outcome == "rounded"
    assert compare(residue + 1e-3, other, near=lambda: other * -1).outcome == "DIFFERS"


def test_a_miscompiled_step_is_refused_only_where_the_reason_is_known() -> None:
    why = "gradient: MiscompileError: `op`: what the compiler made of it computes something else"
    for case, outcome in (("nn.functional.upsample_nearest", "refused"), ("sin", "DIFFERS")):
        row = Row("OpInfo", case, "inductor", "cuda").add([Verdict("DIFFERS", "float32[7]", why)])
        assert row.outcome == outcome


def test_ops_are_as_eager() -> None:
    # Where torch's own testing tools are imported, no test can set a flag of `torch.backends`: another process does it.
    worker = Worker("cpu")
    try:
        for case in share(["addmm", "nn.functional.huber_loss"], 2):
            [row] = worker.ask(("opinfo", case, "aten"), "cpu", seconds=120)
            assert Row(**row).outcome == "equal", row["notes"]
            assert row["counts"]["equal"] > 10
        for case in share(["index_fill", "ldexp", "nn.functional.layer_norm"], 2):
            [row] = worker.ask(("members", case, "aten"), "cpu", seconds=120)
            assert not {"DIFFERS", "refused"} & row["counts"].keys(), row["notes"]
            assert row["counts"]["equal"] + row["counts"].get("rounded", 0) > 3
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("judge", "case"),
    [
        ("donation", "donated twice"),
        ("donation", "outputs are not the donated memory"),
        ("engines", "interleaved order of micro batches"),
        ("engines", "first microbatch flag"),
        ("graphs", "gradient scaling"),
        ("graphs", "outputs that alias"),
        ("graphs", "host reads are refused"),
        ("tensordict", "cudagraphs backprop"),
    ],
)
def test_scenarios_end_as_the_judge_says(judge: str, case: str) -> None:
    [row] = JUDGES[judge].run(case, "aten", "cpu")
    assert row.outcome == "equal", row.notes


@pytest.mark.parametrize("case", ["lion", "warmup_cosine_decay_schedule"])
def test_optax_agrees(case: str) -> None:
    pytest.importorskip("optax")
    [row] = JUDGES["optax"].run(case, "aten", "cpu")
    assert row.outcome in ("equal", "rounded"), row.notes


def test_a_difference_is_documented_only_where_it_was_seen() -> None:
    known = Row("optax", "nadam", "aten", "cpu").add([Verdict("DIFFERS", "a", "off by 3e-01 of the way")])
    assert known.outcome == "documented"
    for case, why in (("adam", "off by 3e-01 of the way"), ("nadam", "RuntimeError: no")):
        assert Row("optax", case, "aten", "cpu").add([Verdict("DIFFERS", "a", why)]).outcome == "DIFFERS"


def test_a_program_that_raises_is_no_success() -> None:
    def breaks(lowering: str, device: str) -> Iterator[Verdict]:
        yield Verdict("equal")
        raise RuntimeError("of the program")

    def is_refused(lowering: str, device: str) -> Iterator[Verdict]:
        raise fcg.LayoutError("of the package")
        yield

    rows = [
        row
        for case in ("breaks", "is refused")
        for row in Scenarios("a", (breaks, is_refused)).run(case, "aten", "cpu")
    ]
    assert [row.outcome for row in rows] == ["DIFFERS", "refused"]
    assert raises(ValueError, lambda: None, "here").outcome == "DIFFERS"
    assert raises(ValueError, lambda: [].index(0), "here").outcome == "equal"
    assert raises(KeyError, lambda: [].index(0), "here").outcome == "DIFFERS"
