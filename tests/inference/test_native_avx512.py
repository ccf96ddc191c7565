"""The AVX-512 code on machines without AVX-512: SIMDe (Debian's libsimde-dev) gives its instructions in AVX2's.

The tables then do, element by element, what AVX2's do, and so give the same bits; but for bf16 where it is multiplied in
pairs, which is shown against torch.
"""

import shlex
import subprocess
from collections.abc import Iterator
from ctypes import CDLL, PyDLL
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.inference.native import NativeDecoder
from slipstream.ops import build, cpu
from slipstream.world.host import processor
from tests.inference import test_k_quants, test_native, test_native_attention
from tests.inference.test_native import Requests, weights_of
from tests.unit import test_ops_optim as optim
from tests.unit.test_inference_sampler import test_the_kernel_draws_what_its_twin_draws as check_sampling
from tests.unit.test_ops import equal_bits

SHIM = Path(__file__).with_name("emulated_avx512.h")
# -mno-avx512f: else the compiler would use what is to be emulated.
SHIMMED = ["-mavx2", "-mfma", "-mf16c", "-mno-avx512f", "-include", str(SHIM)]
PROCESSOR = '#include "slipstream_ops.h"\nenum isa slipstream_best_isa(void) { return AVX512BF16; }\n'


def why_not() -> str | None:
    compiler = build.find_compiler()
    if compiler is None:
        return "no C compiler"
    if not {"avx2", "fma", "f16c"} <= set(processor().get("flags", "").split()):
        return "emulation needs a processor with AVX2, FMA and F16C"
    source = "#include <simde/x86/avx512/dpbf16.h>"
    command = [*compiler, "-E", "-xc", "-", "-o", "/dev/null"]
    probe = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    return "SIMDe's headers are not installed (libsimde-dev)" if probe.returncode else None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]  # to compile takes two minutes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> build.Library:
    folder, compiler = tmp_path_factory.mktemp("emulated"), build.find_compiler()
    assert compiler is not None
    (folder / "processor.c").write_text(PROCESSOR)
    running = []
    for source, sets in build.SOURCES.items():
        for isa in sets:
            command = [*build.compile_one(compiler, source, isa, folder), "-O1", *(SHIMMED if "avx512" in isa else ())]
            if source == "processor.c":
                command = [*(str(folder / source) if part.endswith("/" + source) else part for part in command), f"-I{build.CSRC}"]
            running.append((command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for command, process in running:
        output = process.communicate()[1]
        assert process.returncode == 0, f"{shlex.join(command)}\n{output}"
    linked = str(folder / build.LIBRARY)
    subprocess.run([*compiler, "-shared", *map(str, folder.glob("*.o")), "-o", linked, "-lm", "-lpthread"], check=True)
    return build.Library(CDLL(linked), PyDLL(linked), "emulated")


@pytest.fixture(autouse=True)
def emulated(library: build.Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything native runs in the test's library."""
    monkeypatch.setattr(build, "load", lambda: library)
    cpu._kernels.cache_clear()
    yield
    cpu._kernels.cache_clear()


@pytest.mark.parametrize("family", ["Llama", "Qwen2Moe"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("isa", ["avx512", "avx512vnni", "avx512bf16"])
def test_decoder(isa: str, kind: str, family: str) -> None:
    test_native.check_against_avx2(isa, kind, family)


def test_products_of_bf16() -> None:
    """A decoder without layers is one product: of rows rounded to bf16, added in fp32."""
    config, weights = weights_of("bfloat16")
    assert cpu.use_isa("avx512bf16")
    runner = NativeDecoder(replace(config, layers=()), replace(weights, layers=[]), num_blocks=64, threads=1)
    rows = Requests(runner, 0)
    tokens = list(range(40))
    requests = [rows.request([token]) for token in tokens]
    actual = torch.stack(rows.run([(request, 0, 1) for request in requests]))
    x = weights.embed[torch.tensor(tokens)].float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weights.final_norm.float()
    head = weights.embed if weights.head is None else weights.head
    expected = normed.bfloat16().double() @ head.double().T
    wrong = ((actual - expected).abs() > 1e-5).sum()
    assert wrong <= 0.02 * expected.numel(), "an input on the border between two bf16 numbers changes a row"
    assert torch.allclose(actual.double(), expected, atol=1e-2)
    runner.close()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("isa", ["avx512", "avx512vnni", "avx512bf16"])
def test_the_same_bits_in_every_batch(isa: str, kind: str) -> None:
    assert cpu.use_isa(isa)
    test_native.test_the_same_bits_in_every_batch(kind, torch.bfloat16, "Llama")


@pytest.mark.parametrize("seed", range(8))
def test_attention(seed: int) -> None:
    assert cpu.use_isa("avx512bf16")
    test_native_attention.test_as_in_fp64("avx512bf16", seed)


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("isa", ["avx512", "avx512vnni", "avx512bf16"])
def test_k_quants_are_multiplied(isa: str, bits: int) -> None:
    test_k_quants.test_products(isa, bits)


def test_what_is_not_finite_stays_so() -> None:
    assert cpu.use_isa("avx512bf16")
    for kind in ("bfloat16", "int8", "int4"):
        test_native.test_what_is_not_finite_stays_so(kind, float("inf"))


@pytest.mark.parametrize("isa", ["avx512", "avx512bf16"])
def test_sampling(isa: str) -> None:
    assert cpu.use_isa(isa)
    check_sampling(isa, 3.0)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_training_kernels(source: torch.dtype, target: torch.dtype) -> None:
    """The sum over ranks, Adam and copies, as in portable C."""
    torch.manual_seed(0)
    numel = 1000
    sources = [torch.randn(numel).to(source) for _ in range(3)]
    sources[1][5:8] = torch.tensor([torch.nan, torch.inf, 1e-7])
    state = [torch.randn(numel).abs() for _ in range(3)]
    results = []
    for isa in ("portable", "avx512"):
        assert cpu.use_isa(isa)
        out, copied = torch.ones(numel, dtype=target), torch.empty(numel, dtype=target)
        ops.sum_ranks(out, sources, alpha=0.3, accumulate=True)
        master, first, second = (tensor.clone() for tensor in state)
        written = torch.empty(numel, dtype=target)
        hyper: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
        ops.adamw(master, sources[0], first, second, written, scale=0.5, step=3, decoupled=True, bias_correction=True, **hyper)
        ops.copy_stream(copied, written)
        results.append([out, master, first, second, written, copied])
    assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rule", optim.RULES)
@pytest.mark.parametrize("recipe", ["fp32", "fp16", "codes", "bf16 at random", "codes at random"])
def test_optimizers(recipe: str, rule: str) -> None:
    """As in portable C, over every kind of storage."""
    if recipe.startswith("codes") and rule not in optim.CODED_RULES:
        pytest.skip("its states are not kept in 8 bits")
    torch.manual_seed(0)
    numel, random = 1000, recipe.endswith("random")
    dtype = torch.float16 if recipe == "fp16" else torch.bfloat16 if random else torch.float32
    master, grad = torch.randn(numel).to(dtype), torch.randn(numel).to(torch.float16)
    grad[500:502] = torch.tensor([torch.nan, torch.inf])
    states: list[Any] = [torch.randn(numel).to(dtype), torch.rand(numel).to(dtype)]
    if recipe.startswith("codes"):
        states = [ops.Blocks.of(x.float(), kind) for x, kind in zip(states, (torch.int8, torch.uint8), strict=True)]
    results = []
    for isa in ("portable", "avx512"):
        assert cpu.use_isa(isa)
        p, m, v, out = master.clone(), *map(optim.clone, states), torch.empty(numel, dtype=torch.bfloat16)
        sums = optim.step(rule, p, grad, m, v, out, ops.Stochastic(1, 2, 1 << 33) if random else None)
        results.append((str(sums), optim.flat(p, m, v, out)))
    assert results[0][0] == results[1][0]
    assert all(equal_bits(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("recipe", optim.RECIPES)
def test_adamw_in_its_recipes(recipe: str) -> None:
    results = []
    for isa in ("portable", "avx512"):
        assert cpu.use_isa(isa)
        results.append(optim.in_recipe(recipe))
    assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))
