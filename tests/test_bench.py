"""The bench at tiny sizes: rows for all systems, losses that agree, failures that stay rows. No times are asserted."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_cg.nn.originals import fixed_tensors
from functional_cg.stages.run.poison import Poisoned
from functional_cg.step.verify import Shadow
from tests.bench import debug, dropout, kernels, measure, members, watch
from tests.bench.__main__ import main
from tests.bench.jax_sharded import mean_and_losses
from tests.bench.many import first_call
from tests.bench.measure import Row, bench
from tests.bench.models import Config, LanguageModel
from tests.bench.modules import names, workload
from tests.bench.system import FEW, OPPONENTS, OURS, VARIANTS, Unavailable
from tests.bench.systems import opponents, torch_systems
from tests.bench.systems.environment import Environment
from tests.bench.systems.jax_losses import jax_loss
from tests.bench.systems.losses import torch_loss
from tests.bench.systems.opponents import build
from tests.bench.systems.spellings import GPT as SPELLED
from tests.bench.systems.spellings import SPELLINGS, Size
from tests.bench.tables import plot, table
from tests.bench.workloads import Workload
from tests.shares import THOROUGH, thorough

CPU = torch.device("cpu")
MLP = Workload("mlp", "mlp", layers=2, width=8, batch=4)
MLP_BF16 = Workload("mlp-bf16", "mlp", layers=2, width=8, batch=4, bf16=True, tolerance=1e-2)
GPT = Workload("gpt", "gpt", layers=1, width=16, batch=2, time=8, vocab=11)
LEAVES = Workload("leaves", "leaves", width=4, leaves=12)
EACH = Workload("each", "optimizer", width=4, leaves=12, learning_rate=1e-2)
FLAT = Workload("flat", "optimizer", width=40, leaves=3, flat=True, learning_rate=1e-2)
RULES = [
    Workload(rule, "optimizer", rule=rule, layers=1, width=16, learning_rate=1e-2, weight_decay=0.0, tolerance=2e-3)
    for rule in ("muon", "lamb", "adafactor")
]  # fmt: skip
# With 4 channels, torch 2.13's oneDNN hangs or crashes in the gradients of a strided 1x1 convolution, in channels_last
# on processors without AVX-512.
CNN = Workload("cnn", "cnn", layers=1, width=8, batch=4, tolerance=1e-3)
HOST = Workload("host", "cnn", layers=1, width=8, batch=4, host=True, tolerance=1e-3)
DROPOUT = Workload("dropout", "dropout", width=64, batch=512, tolerance=5e-2)
ACTOR = Workload("actor", "actor", layers=1, width=8, batch=4, tolerance=1e-3)
LOOP = Workload("loop", "loop", layers=1, width=8, batch=4, tolerance=1e-3)
TRAINED = [MLP, MLP_BF16, GPT, CNN, DROPOUT, ACTOR]
ALL = pytest.mark.parametrize(
    "work", [*TRAINED, LEAVES, EACH, FLAT, *RULES, HOST, LOOP], ids=lambda work: work.name
)
DEBUGGED = pytest.mark.parametrize("work", [MLP, GPT, LEAVES], ids=lambda work: work.name)


def run(work: Workload, *against: str) -> list[Row]:
    """Rows of a short run against the aten lowering, which needs no compiler."""
    emitted: list[Row] = []
    rows = bench(work, against, CPU, emitted.append, anchor="ours-aten", steps=4)
    assert emitted == rows
    return rows


@ALL
def test_eager_and_ours_start_from_the_same_values(work: Workload) -> None:
    ours, eager = run(work, "eager")
    assert (ours.system, ours.status, ours.reason) == ("ours-aten", "ok", "")
    assert ours.counts["captures"] == (2 if work.kind == "loop" else 1)
    assert ours.counts["replays"] > 4
    assert ours.ms is not None
    assert ours.ms.steps == 4
    if work in (MLP, MLP_BF16):  # the floor is measured by products of their own
        dtype = torch.bfloat16 if work.bf16 else torch.float32
        assert any(f"a product of {dtype}" in note for note in ours.notes), ours.notes
    if work.kind == "leaves":
        assert eager.status == "skipped"
        return
    assert eager.status == "ok", eager.reason
    assert eager.losses_agree
    assert eager.ratio is not None
    assert eager.ms is not None
    assert eager.ms.least <= eager.ms.median <= eager.ms.most
    assert len(set(ours.losses)) == len(ours.losses)
    if work.kind != "loop":
        assert ours.floor_ms is not None
        assert ours.over_floor is not None
        assert ours.over_floor > 0


def test_variants_of_ours_compute_the_same_where_they_should() -> None:
    for work in (FLAT, HOST):
        variants = [name for name in VARIANTS if name in work.systems]
        assert len(variants) == (5 if work is FLAT else 2)
        rows = run(work, *variants)
        assert [row.status for row in rows] == ["ok"] * len(rows), [row.reason for row in rows]
        assert all(row.losses_agree for row in rows), [row.losses for row in rows]
        assert all(row.counts["captures"] == 1 for row in rows)


@pytest.mark.parametrize("name", ["leaves-100-one", "leaves-100-flat", "leaves-100-each"])
def test_the_same_step_over_ten_leaves_is_timed_in_turns_with_ours(name: str) -> None:
    row = run(workload(name), FEW)[1]
    assert (row.status, row.losses_agree, row.counts["captures"]) == ("ok", True, 1), row.reason
    assert row.host_ratio is not None
    assert row.floor_ms is None
    assert row.notes == []
    assert FEW not in workload(name.replace("100", "10")).systems


@pytest.mark.parametrize("spelling", SPELLINGS if THOROUGH else ("logsumexp", "ignored"))
def test_a_module_in_each_spelling_is_trained_alike(spelling: str) -> None:
    ours, eager, compiled = run(workload(f"spelling-{spelling}-tiny"), "eager", "max-autotune")
    assert (eager.status, eager.losses_agree) == ("ok", True), eager.reason
    assert ours.counts["captures"] == 1
    assert ours.tokens_per_s is not None
    assert (compiled.status, compiled.reason) == ("skipped", "is made for GPUs")


def test_spellings_of_the_same_arithmetic_have_the_same_loss() -> None:
    size = Size(layers=1, width=64, vocab=50, batch=2, time=8)
    x, y = torch.randint(50, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    losses = {}
    for spelling in ("plain", "cast-first", "logsumexp"):
        torch.manual_seed(0)
        losses[spelling] = SPELLED(size, spelling)(x, y).item()
    assert losses == pytest.approx(dict.fromkeys(losses, losses["plain"]), rel=1e-5)


def test_a_model_whose_library_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(workload("zoo-vit"), library="no_such_library", data=lambda count: [])  # type: ignore[call-arg]
    (row,) = run(missing)
    assert (row.status, row.reason) == ("skipped", "no_such_library is not installed")


def test_the_count_of_nanogpt_is_the_one_it_prints() -> None:
    """Of GPT-2 124M, by the formula in its source: 6 N + 12 L H Q T for each token."""
    work = workload("spelling-plain")
    assert work.parameters() == pytest.approx(124.4e6, rel=0.01)
    assert work.model_flops() / (16 * 1024) == pytest.approx(8.55e8, rel=0.02)


@pytest.mark.parametrize("name", [*OPPONENTS, *OURS, *VARIANTS])
def test_every_system_is_made_for_some_workload_and_named_where_it_is_not(name: str) -> None:
    systems = {work: workload(work).systems for work in names()}
    assert any(name in known for known in systems.values())
    others = [work for work, known in systems.items() if name not in known]
    for other in others[:1]:
        with pytest.raises(Unavailable, match=f"is not made for {other}"):
            build(name, workload(other), CPU, [])


@pytest.mark.parametrize("work", RULES, ids=lambda work: work.name)
def test_a_rule_with_another_number_is_marked(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth more of a learning rate is seen."""
    classes = torch_systems.in_classes

    def planted(work: Workload, leaves: Any) -> Any:
        return classes(replace(work, learning_rate=1.1 * work.learning_rate), leaves)

    monkeypatch.setattr(torch_systems, "in_classes", planted)
    assert run(work, "eager")[1].losses_agree is False


def test_a_class_that_is_not_there_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_optimizer", None)
    monkeypatch.delattr(torch.optim, "Muon")
    muon, lamb, _ = RULES
    for work, name in ((muon, "torch.optim.Muon"), (lamb, "torch_optimizer.Lamb")):
        rows = run(work, "eager", "compile")
        assert [row.status for row in rows] == ["ok", "skipped", "skipped"]
        assert f"skipped: eager: needs {name}" in table(work, rows)


@pytest.mark.parametrize("name", ["muon", "lamb", "adafactor"])
def test_rules_are_timed_on_the_blocks_of_gpt2(name: str) -> None:
    gpt, work = workload("gpt2-124m"), workload(f"optimizer-{name}")
    assert (work.layers, work.width) == (gpt.layers, gpt.width)
    small = {"layers": 1, "width": 8, "vocab": 1, "time": 1}
    params, block = replace(work, **small).params(), replace(gpt, **small).params()
    assert params.keys() == block.keys() - {"wte", "wpe", "norm", "shift"}
    assert all(params[key].shape == block[key].shape for key in params)
    assert replace(work, **small).gradients().keys() == params.keys()
    assert work.systems == ("ours", "ours-aten", "eager", "compile", "jax")


@pytest.mark.parametrize("name", ["leaves-10000-each", "leaves-10000-flat", "optimizer-10000"])
def test_what_would_compile_for_minutes_is_skipped_with_its_reason(name: str) -> None:
    work = workload(name)
    assert work.anchor == "ours-aten"
    for system in ("ours", "compile"):
        with pytest.raises(Unavailable, match="takes minutes to compile for 10,000 leaves"):
            build(system, work, CPU, [])
    assert workload("leaves-100-each").anchor == workload("leaves-1000-flat").anchor == "ours"


def test_the_environment_repeats_itself() -> None:
    seen: list[Any] = []

    def learn(x: Any, y: Any) -> None:
        seen.append((x.copy(), y.copy()))

    for _ in range(2):
        environment = Environment(3)
        for turn in range(4):
            environment.turn(lambda x, turn=turn: (x[:, 0] > 0) + turn % 2, learn)
    for first, second in zip(seen[:4], seen[4:], strict=True):
        assert (first[0] == second[0]).all()
        assert (first[1] == second[1]).all()
    assert (seen[0][0] != seen[1][0]).any()
    assert seen[0][0].shape == (3, 16)
    assert seen[0][1].shape == (3, 2)


def test_a_picture_of_the_rows(tmp_path: Path) -> None:
    rows = [json.loads(row.as_json({})) for row in run(MLP, "eager", "hand-graph")]
    plot(rows, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no system has times"):
        plot(rows[2:], tmp_path / "none.png")


@thorough
@pytest.mark.slow
def test_first_calls_are_made_in_processes_of_their_own() -> None:
    work = workload("mlp-4x64")
    cold, warm = first_call.rows(work, ["eager"], CPU, math.inf)
    assert (cold.system, cold.status, warm.system) == ("eager, cold", "ok", "eager, warm")
    assert cold.first_step_s is not None
    assert cold.first_step_s > 0
    assert cold.losses == warm.losses
    assert "eager, cold" in table(work, [cold, warm])
    late = list(first_call.rows(work, ["eager"], CPU, -math.inf))
    assert [row.status for row in late] == ["skipped", "skipped"]


def test_graphs_by_hand_are_skipped_by_name() -> None:
    rows = run(MLP, "reduce-overhead", "hand-graph", "hand-graph-compiled")
    assert [row.status for row in rows] == ["ok", "skipped", "skipped", "skipped"]
    text = table(MLP, rows)
    for row in rows[1:]:
        assert f"skipped: {row.system}: needs CUDA graphs" in text


def test_a_failure_is_a_row_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(name: str, *rest: Any) -> Any:
        if name == "compile":
            raise ValueError("planted\nsecond line")
        return build(name, *rest)

    monkeypatch.setattr(measure, "build", planted)
    rows = run(MLP, "compile", "eager")
    assert [row.status for row in rows] == ["ok", "failed", "ok"]
    assert rows[1].reason == "ValueError: planted"
    assert "Traceback" in capsys.readouterr().err
    assert "failed: compile: ValueError: planted" in table(MLP, rows)


def test_other_losses_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(name: str, *rest: Any) -> Any:
        system = build(name, *rest)
        if name == "eager":
            step = system.step
            system.step = lambda batch: step(batch) * 1.01
        return system

    monkeypatch.setattr(measure, "build", planted)
    rows = run(MLP, "eager")
    assert rows[1].losses_agree is False
    assert "DIFFERS" in table(MLP, rows)


def test_nothing_starts_after_the_deadline() -> None:
    rows = bench(MLP, ["eager"], CPU, lambda row: None, anchor="ours-aten", steps=4, deadline=-math.inf)
    assert [row.status for row in rows] == ["skipped", "skipped"]
    assert "no timed steps" in table(MLP, rows)


def test_a_row_is_one_line_of_json() -> None:
    row = Row("w", "s", losses=[1.0, math.nan], loss_distance=math.inf)
    line = row.as_json({"torch": "x"})
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["losses"] == [1.0, None]
    assert parsed["loss_distance"] is None
    assert parsed["torch"] == "x"


@ALL
def test_values_and_batches_are_the_same_at_each_call(work: Workload) -> None:
    first, second = work.params(), work.params()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for a, b in zip(work.batches(3), work.batches(3), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_gpt2_has_its_size() -> None:
    work = workload("gpt2-124m")
    small = Workload("x", "gpt", layers=work.layers, width=work.width, time=work.time, vocab=1)
    size = sum(value.numel() for value in small.params().values()) + (work.vocab - 1) * work.width
    assert 124_000_000 < size < 125_000_000
    wanted = "mlp-tiny gpt-nano cnn optimizer host-batch dropout rl-update rl-loop mlp-4x64".split()
    wanted += [f"leaves-{n}-{how}" for n in (10, 100, 1000, 10_000) for how in ("one", "flat", "each")]
    assert set(wanted) <= set(names())


@pytest.mark.parametrize("work", [MLP, GPT, CNN, ACTOR], ids=lambda work: work.name)
def test_jax_computes_the_same_loss(work: Workload) -> None:
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    params, (batch,) = work.params(), work.batches(1)
    arrays, extra = (
        {name: jax.numpy.asarray(value.numpy()) for name, value in tree.items()}
        for tree in (params, work.buffers())
    )
    x = batch["x"].permute(0, 2, 3, 1) if work.kind == "cnn" else batch["x"]
    got, new = jax.jit(jax_loss(work, jax, optax, None))(
        arrays, extra, jax.numpy.asarray(x.numpy()), jax.numpy.asarray(batch["y"].numpy())
    )
    buffers = work.buffers()
    wanted = torch_loss(work)({**params, **buffers}, batch["x"], batch["y"])
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    for name, value in buffers.items():
        assert torch.allclose(torch.from_numpy(jax.device_get(new[name]).copy()), value, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_jax_computes_the_loss_of_the_module(kind: str) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    c = Config("small", kind, 1, 32, 4, 4 if kind == "gpt" else 2, 64, 128, 2, 16)
    torch.manual_seed(0)
    model = LanguageModel(c)
    tokens = torch.randint(c.vocab, (2, c.batch, c.time))
    arrays = {name: jax.numpy.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    mean, rows = mean_and_losses(arrays, *(jax.numpy.asarray(part.numpy()) for part in tokens), c)
    assert float(mean) == pytest.approx(model(*tokens).item(), rel=2e-3)  # products are in bf16
    assert float(rows.mean()) == pytest.approx(float(mean), rel=1e-6)


def test_jax_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(Unavailable, match="jax"):
        build("jax", MLP, CPU, MLP.batches(1))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--workload", "leaves-10-one", "--against", "eager", "--ours", "ours-aten", "--device", "cpu"]
    picture = tmp_path / "times.png"
    assert main([*options, "--steps", "3", "--json", "--out", str(out), "--plot", str(picture)]) == 0
    assert picture.exists()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["system"], row["status"]) for row in lines] == [("ours-aten", "ok"), ("eager", "skipped")]
    assert lines[0]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert [json.loads(line) for line in printed.splitlines() if line.startswith("{")] == lines
    assert "skipped: eager: is not made for leaves-10-one" in printed
    assert "10 leaves of f32[4]" in printed


@pytest.mark.parametrize(
    "options",
    [
        ["--workload", "nothing"],
        ["--against", "eager,tensorflow"],
        ["--steps", "0"],
        ["--device", "tpu"],
        ["--workload", ","],
        ["--plot", "nowhere/times.png"],
        ["--plot", "times.nothing"],
        ["--plot", "."],
        ["--workload", "first-call", "--steps", "3"],
        ["--workload", "first-call", "--plot", "times.png"],
        ["--workload", "first-call", "--nodes"],
        ["--workload", "first-call", "--against", "ours-prefetch"],
        ["--workload", "mlp-4x64,first-call", "--against", "hand-graph"],
        ["--out", "times.png", "--plot", "times.png"],
        ["--out", "/dev/null", "--plot", "times.png"],
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_picture_needs_matplotlib_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(SystemExit):
        main(["--workload", "leaves-10-one", "--plot", "times.png"])
    assert "--plot times.png: " in capsys.readouterr().err


def test_columns_of_the_table_agree_with_each_other() -> None:
    rows = run(LEAVES, "ours")
    one = rows[1]
    assert one.ms is not None
    assert one.ours_ms is not None
    assert one.ratio == one.ms.median / one.ours_ms.median
    head, _, line, *_ = table(LEAVES, rows).splitlines()[1:]
    assert line.split()[6:8] == [f"{one.ours_ms.median:.4f}", f"{one.ratio:.2f}"]
    assert re.split(r"\s{2,}", head)[6:8] == ["ours ms", "x ours"]


def test_every_opponent_is_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--against", "?"])
    message = capsys.readouterr().err
    assert all(name in message for name in (*OPPONENTS, *OURS, *VARIANTS))


def test_dropout_rows_are_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_SHAPES", {"cpu": ((4, 8),)})
    monkeypatch.setattr(dropout, "_TARGET_S", 1e-4)
    assert dropout.main(["--device", "cpu", "--lowering", "aten"]) == 0
    first, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["torch"] == torch.__version__
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["keyed_us"] > 0 and row["torch_us"] > 0 for row in rows)


@DEBUGGED
def test_debug_has_a_row_for_each_setting_and_checks_each_call(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(kind: Any, method: str) -> None:
        act = getattr(kind, method)

        def counting(*args: Any) -> Any:
            calls[method] += 1
            return act(*args)

        monkeypatch.setattr(kind, method, counting)

    systems: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        systems.append(opponents.ours(*args, **options))
        return systems[-1]

    count(Shadow, "verify")
    count(Poisoned, "__call__")
    monkeypatch.setattr(debug, "ours", noted)
    found = list(debug.rows(work, "aten", CPU, 4))
    assert [row["debug"] for row in found] == ["off", "poison", "verify", "verify+poison"]
    assert found[0]["ratio"] == 1
    assert all(row["steps"] == 4 and row["least"] <= row["median"] <= row["most"] for row in found)
    replays = systems[0].counts()["replays"]
    assert replays > 4
    assert [system.counts() for system in systems] == [{"captures": 1, "replays": replays}] * 4
    assert calls == {"verify": 2 * replays, "__call__": 2 * replays}


def test_debug_rows_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--lowering", "aten", "--workload", "leaves-10-one", "--steps", "2"]
    assert debug.main(options) == 0
    first, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["torch"] == torch.__version__
    assert [(row["workload"], row["debug"]) for row in found] == [
        ("leaves-10-one", name) for name in ("off", "poison", "verify", "verify+poison")
    ]
    assert all(row["median"] > 0 for row in found)


def test_watch_rows_are_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_CALLS", 2)
    assert watch.main(["--values", "4", "--turns", "2"]) == 0
    first, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["torch"] == torch.__version__
    assert [row["values"] for row in found] == [4] * 6
    assert all(row["us_per_call"] > 0 for row in found)


def test_members_trained_at_once_have_the_losses_of_members_in_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_TURNS", 2)
    options = ["--workload", "mlp", "--members", "2", "--system", "sweep", "loop", "--device", "cpu"]
    assert members.main(options) == 0
    _, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["members"], row["system"]) for row in found] == [
        (2, "sweep"),
        (2, "loop"),
    ]
    assert all(row["apart"] < 1e-5 and row["ms"] > 0 for row in found)


def test_a_step_of_the_bench_watches_each_value() -> None:
    def watched(step: Any) -> int:
        step(torch.ones(2))
        (lowered,) = next(iter(step._lowered.values()))
        held = sum(len(getattr(one.old, "parts", (0,))) for one in lowered.guards.watch._entries)
        originals = {one.original for one in lowered.program.applications}
        return held + sum(len(fixed_tensors(one._module())) for one in originals)

    for _, make in watch._KINDS:
        assert watched(make(8)) >= watched(make(0)) + 7
    assert len(watch._constants(8)._constants.named()) == 8


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_the_kernels_of_a_gpu_are_counted_without_one() -> None:
    """Each leaf's update is one of them."""
    work = workload("mlp-4x64")
    found = kernels.launches(work)
    assert sum(count for name, count in found.items() if "update" in name) == len(work.params())
    assert found.total() < 40
