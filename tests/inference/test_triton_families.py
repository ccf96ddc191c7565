"""The CUDA forward of each family against the torch twin, by tiny random models: in Triton's interpreter where there is no GPU.

tests/gpu/cases.py calls the checks too."""

from typing import Any

import pytest
import torch

from tests.inference.test_triton import DEAR, DEVICE, quick_interpreter, runner_of  # noqa: F401, isort: skip; it finds triton
from slipstream.inference.cuda import CudaDecoder, why_not
from slipstream.inference.decoder import Decoder
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.weights import leaves, mapped, quantize
from slipstream.ops.matrices import dequantize
from tests.cases import EVERYTHING
from tests.inference import test_embedding, test_families, test_long_rope
from tests.inference.test_native import Requests

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALL = EVERYTHING or DEVICE == "cuda"  # each prompt in each way; in the interpreter they take turns
QUICK = ("gpt2", "deepseek-v2-groups", "bert")
QUANTIZED = ("gpt2", "opt-350m", "stablelm-norms", "deepseek-v2-groups", "deepseek-v3")
LIMITS = {torch.float32: 1e-3 if DEVICE == "cuda" else 2e-4, torch.bfloat16: 0.05}  # of the norm of the logits


def sides_of(model: Any, dtype: torch.dtype, kind: str = "") -> tuple[Any, Any, Any]:
    """The twin, of weights that were quantized to `kind` if it is given, the kernels, and a copy of their weights."""
    config = from_hf(model.config.to_dict())

    def weights() -> Any:
        own = mapped(from_state(config, model.to(dtype).state_dict()), lambda role, m: m.to(DEVICE, copy=True))
        return quantize(own, kind, 32) if kind else own

    assert why_not(config, weights(), torch.device(DEVICE)) is None
    plain = mapped(weights(), lambda role, m: dequantize(m).to(dtype))
    return runner_of(Decoder, config, plain, dtype), runner_of(CudaDecoder, config, weights(), dtype, max_batch=2), weights()


def same(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((actual - expected).norm() / expected.norm())
    assert error < LIMITS[dtype], f"{dtype}: off by {error:.3g} of the norm"


def check_logits(
    model: Any, prompts: list[list[int]], dtype: torch.dtype = torch.float32, kind: str = "", *, whole: bool = False
) -> None:
    """Prompts in chunks beside each other, then a token each, by a graph where there is a GPU (`whole`: neither): as the twin's,
    with the bits of a prompt alone, and again after all weights were put anew."""
    twin, cuda, weights = sides_of(model, dtype, kind)
    both = [Requests(side, 0) for side in (twin, cuda)]
    requests = [[side.request(prompt) for prompt in prompts] for side in both]
    ends = [len(prompt) for prompt in prompts]
    starts = [0] * len(ends)
    actual = torch.empty(0)
    for stops in ([end // 2 for end in ends], [end - 1 for end in ends], ends)[2 * whole :]:
        expected, actual = (
            torch.stack(side.run(list(zip(own, starts, stops, strict=True)))) for side, own in zip(both, requests, strict=True)
        )
        same(actual, expected, dtype)
        starts = stops
    for anew in (False, True):
        for role, weight in leaves(weights) if anew else ():
            cuda.put(role, weight)
        alone, some = Requests(cuda, 1), slice(None) if ALL else slice(int(anew), None, 2)
        for prompt, logits in zip(prompts[some], actual[some], strict=True):
            assert alone.run([(alone.request(prompt), 0, len(prompt))])[0].equal(logits)


def check_hidden(model: Any, texts: list[list[int]], dtype: torch.dtype = torch.float32) -> None:
    """Texts together, with and without types of their tokens: as the twin's, with the bits of a text alone."""
    twin, cuda, _ = sides_of(model, dtype)
    types = [[int(i > 2) for i in range(len(text))] for text in texts]
    actual = cuda.hidden(texts)
    same(actual, twin.hidden(texts), dtype)
    assert torch.cat([cuda.hidden([text]) for text in texts]).equal(actual)
    if cuda.config.num_token_types > 1:
        some = slice(None if ALL else 2)
        same(cuda.hidden(texts[some], types[some]), twin.hidden(texts[some], types[some]), dtype)


def quick(names: Any) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=DEAR) for name in names]


PROMPTS = [[i * i % 127 + 1 for i in range(length)] for length in (3, 21)]
TEXTS = [text[:40] for text in test_embedding.TEXTS[:4]]


@pytest.mark.parametrize("case", quick(test_families.CASES))
def test_logits(case: str) -> None:
    check_logits(test_families.model_of(case), PROMPTS)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", [pytest.param(name, marks=DEAR) for name in QUANTIZED])
def test_logits_of_quantized_weights(case: str, kind: str) -> None:
    check_logits(test_families.model_of(case), PROMPTS, kind=kind)


@pytest.mark.parametrize("case", quick(test_long_rope.CASES))
def test_logits_of_short_and_long_texts(case: str) -> None:
    check_logits(test_long_rope.model_of(case), test_long_rope.TEXTS[1:4], whole=True)


@pytest.mark.parametrize("case", quick(test_embedding.CASES))
def test_hidden_states(case: str) -> None:
    check_hidden(test_embedding.model_of(case), TEXTS[1:] if case == "bert" else TEXTS)
