"""Captured steps in the loops of other libraries, compared with the plain runs of these libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functional_cg as fcg
from functional_cg.trainers import module_step

STEPS = 24


class Net(nn.Module):
    """Has a buffer, a frozen parameter, one that the loss does not use, and one that no optimizer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3)
        )
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.unowned = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.frozen * self.unowned


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = {name.rpartition(".")[2]: p for name, p in model.named_parameters()}
    rest = [
        p
        for p in model.parameters()
        if p.dim() < 2 and p is not named["unused"] and p is not named["unowned"]
    ]
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    return [matrices, {"params": rest}, {"params": [named["unused"]]}]


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def batches() -> list[list[Any]]:
    g = torch.Generator().manual_seed(1)
    pair = lambda: (torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g))  # noqa: E731
    return [[pair(), pair()] for _ in range(STEPS)]


def made(kind: Callable[..., Any], **numbers: Any) -> tuple[Net, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(groups(model), lr=1e-2, **numbers)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def by_hand(
    model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
) -> Any:
    def train_step(*parts: Any) -> list[float]:
        losses = [loss_fn(model, part) / len(parts) for part in parts[:1]]
        backward(losses[0])
        for part in parts[1:]:
            losses.append(loss_fn(model, part) / len(parts))
            backward(losses[-1])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return [loss.item() for loss in losses]

    return train_step


def captured(model: nn.Module, optimizer: Any, loss: Any = loss_fn) -> Any:
    step = module_step(model, optimizer, loss, max_norm=1.0)
    return lambda *parts: [float(loss) for loss in step(*parts)["losses"]]


def trained(step: Any, scheduler: Any, rows: list[Any]) -> list[list[float]]:
    losses = []
    for parts in rows:
        losses.append(step(*parts))
        scheduler.step()
    return losses


def tensors(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    kept = optimizer.state_dict()["state"]
    of_optimizer = {f"{i} {key}": value for i, own in kept.items() for key, value in own.items()}
    return model.state_dict() | {
        key: one for key, one in of_optimizer.items() if isinstance(one, torch.Tensor)
    }


@pytest.mark.parametrize(
    ("kind", "numbers", "atol"),
    [
        (torch.optim.AdamW, {"fused": True}, 0.0),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.01}, 0.0),
        (torch.optim.AdamW, {}, 1e-6),
        (torch.optim.AdamW, {"amsgrad": True}, 1e-6),
    ],
)
def test_a_loop_trains_as_without_and_resumes_in_both_directions(
    kind: Any, numbers: Any, atol: float
) -> None:
    rows = batches()
    plain = made(kind, **numbers)
    losses = trained(by_hand(*plain[:2]), plain[2], rows)
    for first, second in ((captured, captured), (captured, by_hand), (by_hand, captured)):
        start, last = made(kind, **numbers), made(kind, **numbers)
        before = trained(first(*start[:2]), start[2], rows[:10])
        for one, other in zip(start, last, strict=True):
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        after = trained(second(*last[:2]), last[2], rows[10:])
        torch.testing.assert_close(before + after, losses, rtol=0, atol=atol)
        expected, got = tensors(*plain[:2]), tensors(*last[:2])
        assert {key: got[key] for key in expected}.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=atol, msg=key)


def test_values_that_are_loaded_between_calls_are_taken_up() -> None:
    rows, run = batches(), made(torch.optim.AdamW, fused=True)
    step = captured(*run[:2])
    trained(step, run[2], rows[:5])
    old = [copy.deepcopy(one.state_dict()) for one in run]
    losses = trained(step, run[2], rows[5:9])
    for one, state in zip(run, old, strict=True):
        one.load_state_dict(state)
    assert trained(step, run[2], rows[5:9]) == losses


def test_dropout_draws_anew_at_each_update_and_goes_on_after_a_resume() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        model.load_state_dict({"0.weight": torch.eye(4), "0.bias": torch.zeros(4)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.0)

    model, optimizer = start()
    step = module_step(model, optimizer, lambda model, x: model(x).sum())
    x = torch.randn(64, 4)
    first = [float(step(x)["loss"]) for _ in range(4)]
    other, resumed = start()
    again = module_step(other, resumed, lambda model, x: model(x).sum())
    half = [float(again(x)["loss"]) for _ in range(2)]
    saved = copy.deepcopy(resumed.state_dict())
    other, resumed = start()
    resumed.load_state_dict(saved)
    again = module_step(other, resumed, lambda model, x: model(x).sum())
    assert len(set(first)) == 4
    assert half + [float(again(x)["loss"]) for _ in range(2)] == first


def of_a_scaler(model: nn.Module, optimizer: Any) -> Any:
    return model, SimpleNamespace(scaler=object(), optimizer=optimizer)


def with_a_hook(model: nn.Module, optimizer: Any) -> Any:
    optimizer.register_step_pre_hook(lambda *_: None)
    return model, optimizer


def of_another_model(model: nn.Module, optimizer: Any) -> Any:
    return nn.Linear(4, 3), optimizer


def in_another_precision(model: nn.Module, optimizer: Any) -> Any:
    model._strategy = SimpleNamespace(precision=SimpleNamespace(precision="bf16-mixed"))  # type: ignore[assignment]
    return model, optimizer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_a_scaler, "a gradient scaler"),
        (with_a_hook, "hooks that run before"),
        (of_another_model, "a parameter .* that is not in the model"),
        (in_another_precision, "Fabric's precision 'bf16-mixed'"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_runs(change: Any, words: str) -> None:
    model, optimizer, _ = made(torch.optim.AdamW)
    with pytest.raises(
        fcg.CaptureError, match=rf"trainers: {words}.*cannot be captured; nothing was trained\.\n"
    ):
        module_step(*change(model, optimizer), loss_fn)


def other_mode(model: nn.Module, optimizer: Any) -> None:
    model.eval()


def other_number(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[1]["weight_decay"] = 0.5


def other_groups(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [model.unowned]})


def own_gradient(model: Any, optimizer: Any) -> None:
    model.unused.grad = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (other_mode, fcg.BakedValueError, "captured with training=True"),
        (other_number, fcg.BakedValueError, r"param_groups\[1\]\['weight_decay'\]  expected 0.01   got 0.5"),
        (other_groups, fcg.BakedValueError, "param_groups  expected the same number"),
        (own_gradient, fcg.CaptureError, "gradients from outside of the step"),
    ],
)
def test_a_change_between_calls_is_refused_and_trains_nothing(change: Any, error: Any, words: str) -> None:
    model, optimizer, _ = made(torch.optim.AdamW)
    step, (first, second, *_) = captured(model, optimizer), batches()
    step(*first)
    change(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=words):
        step(*second)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# -- with the libraries -------------------------------------------------------------------------------------------

loud = pytest.mark.filterwarnings("ignore")  # the libraries warn about themselves


def same_runs(plain: tuple[Any, ...], ours: tuple[Any, ...]) -> None:
    assert trained(plain[0], plain[3], batches()) == trained(ours[0], ours[3], batches())
    expected, got = tensors(*plain[1:3]), tensors(*ours[1:3])
    assert [key for key, value in expected.items() if not torch.equal(got[key], value)] == []


@loud
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_loop_of_fabric(precision: Any) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1, precision=precision)

    def half(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    def start(of: Any) -> tuple[Any, ...]:
        model, optimizer, _ = made(torch.optim.AdamW, fused=True)
        model, optimizer = fabric.setup(model, optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        if of is by_hand:
            return by_hand(model, optimizer, fabric.backward), model, optimizer, scheduler
        full = precision == "32-true"
        step = captured(model, optimizer) if full else captured(model.module, optimizer, half)
        return step, model, optimizer, scheduler

    same_runs(start(by_hand), start(captured))


@loud
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerate(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)

    def start(of: Any) -> tuple[Any, ...]:
        model, optimizer, scheduler = accelerator.prepare(*made(torch.optim.AdamW, fused=True))
        return of(model, optimizer), model, optimizer, scheduler

    same_runs(start(by_hand), start(captured))


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


ARGUMENTS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "weight_decay": 0.1,
    "lr_scheduler_type": "cosine", "learning_rate": 1e-2, "max_steps": STEPS, "logging_steps": 1, "save_steps": 10,
    "report_to": [], "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


def logged(trainer: Any) -> list[list[float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row[name] for name in ("loss", "grad_norm", "learning_rate")] for row in rows]


def plain_and_resumed(plain: Any, ours: Any, folder: Any, atol: float) -> None:
    """A plain run, one that is captured, and both resumed from a checkpoint of the latter."""
    theirs, captured = plain(folder / "plain"), ours(folder / "ours")
    theirs.train()
    captured.train()
    assert captured.captured.step.stats.captures == 1
    expected = logged(theirs)
    assert len(expected) == STEPS
    torch.testing.assert_close(logged(captured), expected, rtol=0, atol=atol)
    for make in (plain, ours):
        resumed = make(folder / "ours")
        resumed.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-10"))
        torch.testing.assert_close(logged(resumed)[-14:], expected[-14:], rtol=0, atol=atol)


@loud
def test_the_trainer_of_hugging_face(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from functional_cg.trainers.hugging_face import CapturedTrainer

    ids = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def start(kind: Any, folder: Any, **others: Any) -> Any:
        arguments = transformers.TrainingArguments(output_dir=str(folder), **(ARGUMENTS | others))
        return kind(model=llama(), args=arguments, train_dataset=data)

    plain_and_resumed(
        lambda at: start(transformers.Trainer, at), lambda at: start(CapturedTrainer, at), tmp_path, 0.0
    )
    refused = start(CapturedTrainer, tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(fcg.CaptureError, match="`group_by_length`, with ever new shapes cannot be captured"):
        refused.train()

    class Looks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            """Would see gradients."""

    refused = start(CapturedTrainer, tmp_path)
    refused.add_callback(Looks())
    with pytest.raises(
        fcg.CaptureError, match=r"`Looks.on_pre_optimizer_step`, which sees gradients, cannot be"
    ):
        refused.train()


@loud
def test_sft_of_trl(tmp_path: Any) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from functional_cg.trainers.trl import CapturedSFTTrainer

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    rows = torch.randint(0, 61, (128, 15), generator=torch.Generator().manual_seed(0)).tolist()
    data = datasets.Dataset.from_list([{"text": " ".join(f"w{i}" for i in row)} for row in rows])

    def start(kind: Any, folder: Any) -> Any:
        arguments = trl.SFTConfig(output_dir=str(folder), bf16=False, max_length=16, **ARGUMENTS)
        return kind(model=llama(), args=arguments, train_dataset=data, processing_class=fast)

    # TRL sums the loss over tokens by a kernel of its own.
    plain_and_resumed(
        lambda at: start(trl.SFTTrainer, at), lambda at: start(CapturedSFTTrainer, at), tmp_path, 2e-5
    )
