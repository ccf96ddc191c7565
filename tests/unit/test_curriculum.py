"""Curriculum learning by sequence length: schedules by their formulas, and what the model sees."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.compat import engine as compat
from slipstream.data import CurriculumScheduler
from slipstream.train.curriculum import cut


def block(**schedule: Any) -> dict[str, Any]:
    kind = schedule.pop("kind", "fixed_linear")
    least, most = schedule.pop("least", 8), schedule.pop("most", 64)
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": least,
        "max_difficulty": most,
        "schedule_type": kind,
        "schedule_config": schedule,
    }


@given(
    least=st.integers(1, 40),
    more=st.integers(0, 200),
    total=st.integers(1, 300),
    unit=st.integers(1, 9),
    degree=st.sampled_from([1, 2, 3]),
)
def test_difficulties_are_those_of_the_formulas(least: int, more: int, total: int, unit: int, degree: int) -> None:
    kind = {"kind": "fixed_linear"} if degree == 1 else {"kind": "fixed_root", "root_degree": degree}
    scheduler = CurriculumScheduler(
        block(least=least, most=least + more, total_curriculum_step=total, difficulty_step=unit, **kind)
    )
    for step in range(1, 2 * total, max(1, total // 20)):
        exact = math.floor((step / total) ** (1 / degree) * more + least)
        first = -(-least // unit) * unit  # not below `least`, of which the lower multiple may be 0
        assert scheduler.get_difficulty(step) == min(max(exact - exact % unit, first), least + more)


def test_lists_and_functions_of_the_step() -> None:
    scheduler = CurriculumScheduler(block(kind="fixed_discrete", difficulty=[8, 16, 64], max_step=[2, 5]))
    assert [scheduler.update_difficulty(step) for step in range(1, 8)] == [8, 8, 16, 16, 16, 64, 64]
    assert scheduler.get_state() == {"current_difficulty": 64, "schedule_type": "fixed_discrete"}
    custom = CurriculumScheduler(block(kind="custom"))
    with pytest.raises(ValueError, match="set_custom_get_difficulty"):
        custom.update_difficulty(1)
    custom.set_custom_get_difficulty(lambda step: 10 * step)
    assert custom.update_difficulty(3) == custom.get_current_difficulty() == 30
    for problem, bad in {
        "schedule_type \\('cubic'\\)": block(kind="cubic"),
        "needs schedule_config.total_curriculum_step": block(difficulty_step=8),
        "needs schedule_config.difficulty and schedule_config.max_step": block(kind="fixed_discrete"),
        "one entry more": block(kind="fixed_discrete", difficulty=[8], max_step=[2]),
        "min_difficulty \\(99\\) is above": block(least=99, total_curriculum_step=2, difficulty_step=1),
    }.items():
        with pytest.raises(ValueError, match=problem):
            CurriculumScheduler(bad)


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.shapes = nn.Embedding(16, 4), list[Any]()

    def forward(self, ids: Tensor, labels: Tensor, scale: Tensor | None = None) -> Tensor:
        assert ids.shape == labels.shape
        self.shapes.append(tuple(ids.shape))
        return self.table(ids).sum(-1).sub(labels).square().mean()  # type: ignore[no-any-return]


class Told(Seen):
    def forward(self, ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        length = kwargs.get("curriculum_seqlen")
        return super().forward(ids[:, :length], labels[:, :length])


@pytest.mark.parametrize("kind", [Seen, Told])
def test_sequences_grow(kind: type[Seen], tmp_path: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "curriculum_learning": block(least=8, most=32, total_curriculum_step=4, difficulty_step=8),
    }
    ids = torch.randint(16, (2, 32))

    def run(engine: Any, steps: int) -> list[int]:
        for _ in range(steps):
            engine.backward(engine(ids, labels=ids))
            engine.step()
        lengths = [shape[1] for shape in engine.module.shapes]
        engine.module.shapes.clear()
        return lengths

    engine, *_ = compat.initialize(model=kind(), config=config)
    assert run(engine, 2) == [8, 16]
    engine.save_checkpoint(str(tmp_path))
    assert run(engine, 4) == [24, 32, 32, 32]
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 32
    engine.load_checkpoint(str(tmp_path))
    assert run(engine, 1) == [24]
    engine.eval()
    with torch.no_grad():
        engine(ids, labels=ids)
    assert engine.module.shapes == [(2, 32)]
    engine.destroy()


def test_a_model_of_transformers_sees_shorter_batches() -> None:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
    ids, mask = torch.randint(32, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    expected = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], labels=ids[:, :8]).loss.item()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "curriculum_learning": block(most=24, total_curriculum_step=10, difficulty_step=8),
    }
    engine, *_ = compat.initialize(model=model, config=config)
    assert engine(input_ids=ids, attention_mask=mask, labels=ids).loss.item() == pytest.approx(expected, rel=1e-6)
    engine.destroy()


def test_what_is_cut() -> None:
    ids, mask = torch.arange(12).view(2, 6), torch.zeros(2, 1, 6, 6)
    embeds, other = torch.zeros(2, 6, 3), torch.zeros(5, 7)
    args, kwargs = cut((ids, other), {"mask": mask, "embeds": embeds, "name": "x"}, 4)
    assert args[0].tolist() == ids[:, :4].tolist() and args[1] is other
    assert kwargs["mask"].shape == (2, 1, 4, 4) and kwargs["embeds"].shape == (2, 4, 3) and kwargs["name"] == "x"
    assert cut((ids,), {}, 99)[0][0] is ids
    with pytest.raises(ValueError, match="the forward gets none"):
        cut((other,), {}, 4)
