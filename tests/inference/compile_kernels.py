"""Compiles Triton's kernels for Hopper, which needs no GPU: `python -m tests.inference.compile_kernels`. A line of JSON for each.

In a process of its own: with TRITON_INTERPRET=1, which the tests have, nothing is compiled.
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.ops.triton import attention, flat, fused, linear, rows, sparse

BF16, FP32, INT = "*bf16", "*fp32", "*i32"
_ATTEND = {"CAP": 0.0, "WINDOW": 64, "KV_HEADS": 8, "GROUP": 4, "PADDED": 4, "DIM": 64, "BLOCK_DIM": 64, "BLOCK_SIZE": 16}
_LINEAR = {"bias": None, "SLICE": 512, "GROUP": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_FEW, _MANY = {"TOGETHER": 1, "ROWS": 16}, {"TOGETHER": 4, "ROWS": 128, "COLUMNS": 128, "num_warps": 8}
_PLAIN, _CODES = {"scale": None, "low": None, "FEATURES": 64}, {"FEATURES": 128}
_HEADS = {"HEADS": 32, "DIM": 64}
_LATENT = {"num_stages": 1, "WINDOW": 0, "KV_HEADS": 1, "GROUP": 128, "PADDED": 128, "DIM": 576, "BLOCK_DIM": 128, "LANES": 128}
_NO_ALIBI = {"slopes": None, "LANES": 16}
_WIDE = {"DIM": 256, "BLOCK_DIM": 128, "LANES": 64, "num_stages": 1}  # in fp32
_RMS, _LAYER = {"CENTERED": False, "bias": None, "post_bias": None, "AFTER": False}, {"CENTERED": True, "AFTER": True}
_PLACE = {"PLANES": 4, "KV_HEADS": 8, "HALF": 32, "BLOCK": 64}
_SPARSE: dict[str, Any] = {
    **dict.fromkeys(("tiles", "panels"), INT),
    **dict.fromkeys(("grad_batch", "length", "first", "seed", "least"), "i32"),
    "scale": "fp32",
}


def _sparse(kernel: Any, dtype: torch.dtype, dim: int, tile: int, bias: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """An entry of KERNELS with constants that `sparse._options` chooses. bias: with all that is added to scores, and dropout."""
    q = torch.empty(1, 8, tile, dim, dtype=dtype, device="meta")
    scores = sparse.Scores(None, None, None, torch.empty(2, 4), torch.empty(0), 1, 1.0, int(bias), 0, not bias)
    heads = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), (BF16 if dtype.itemsize == 2 else FP32, *["i32"] * 3))
    added = {"added": (FP32, "i32", "i32", FP32, INT) if bias else ("constexpr", "i32", "i32", "constexpr", "constexpr")}
    options = sparse._options(q, q[:, :2], scores, backward=kernel is not sparse._forward)
    return kernel, _SPARSE | heads | added, options | ({} if bias else {"bias_grad": None})


_FUSED: dict[str, Any] = {
    **dict.fromkeys(("x", "bias", "residual", "total", "out", "grad", "sum_grad", "dsum", "dx", "up", "dup"), BF16),
    **dict.fromkeys(("columns", "heads", "tokens", "stride", "seed", "least"), "i32"),
    "logits": BF16,
    "target": "*i64",
    "smoothing": "fp32",
}
# Kernel, the types of its pointers (fp32 unless said), its constants and options.
KERNELS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (linear._linear, {"x": BF16, "weight": BF16}, _LINEAR | _PLAIN | _FEW),
    (linear._linear, {"x": BF16, "weight": BF16}, _LINEAR | _PLAIN | _MANY),
    (linear._linear, {"x": BF16, "weight": "*i8"}, _LINEAR | _CODES | _FEW | {"low": None}),
    (linear._linear, {"x": BF16, "weight": "*u8"}, _LINEAR | _CODES | _MANY),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | _NO_ALIBI),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | {"LANES": 64}),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | _NO_ALIBI | _LATENT),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | _WIDE | {"BLOCK_DIM": 256}),
    (attention._attend, {}, _ATTEND | _WIDE | {"DIM": 128}),
    (attention._attend, {}, _ATTEND | _WIDE),
    (linear._linear, {}, _LINEAR | _PLAIN | _FEW | {"FEATURES": 32, "num_stages": 6}),
    (linear._linear, {}, _LINEAR | _PLAIN | _FEW | {"FEATURES": 32, "ROWS": 64, "num_stages": 6}),
    (attention._combine, {"out": BF16}, _HEADS | {"WINDOW": 64, "BLOCK_DIM": 64}),
    (rows._add_norm, {"out": BF16}, _RMS | {"PLANES": 4, "BLOCK": 2048}),
    (rows._add_norm, {"out": BF16}, _LAYER | {"PLANES": 4, "BLOCK": 2048}),
    (rows._add_norm, {}, _RMS | {"post": None, "weight": None, "out": None, "PLANES": 1, "BLOCK": 2048}),
    (
        rows._place,
        dict.fromkeys(("q", "keys", "values"), BF16),
        _HEADS | _PLACE | {"norm_bias": None, "moments": None, "CENTERED": False},
    ),
    (rows._place, dict.fromkeys(("q", "keys", "values"), BF16), _HEADS | _PLACE | {"moments": None, "CENTERED": True}),
    (rows._place, dict.fromkeys(("q", "keys", "values"), BF16), _HEADS | _PLACE | {"norm_bias": None, "CENTERED": False}),
    (rows._whole_moments, {}, {"PLANES": 4, "CENTERED": False, "Q_SIZE": 2048, "K_SIZE": 512, "BLOCK": 2048, "num_warps": 4}),
    (
        flat._step,
        dict.fromkeys(("grad", "out"), BF16),
        {
            "RULE": 0,
            **dict.fromkeys(("FROM", "UPDATE_FROM", "FIRST", "NESTEROV"), False),
            "KEEPS": False,
            "L2": False,
            "BLOCK": 1024,
            "num_warps": 4,
        },
    ),
    (flat._reduce, {"out": BF16, "source": BF16, "squares": "*fp64"}, {"ACCUMULATE": True, "BLOCK": 1024, "num_warps": 4}),
    (rows._gate, {"out": BF16}, {"ACTIVATION": "gelu", "GATED": True, "PLANES": 1, "BLOCK": 1024}),
    (rows._gate, {"out": BF16}, {"ACTIVATION": "relu", "GATED": False, "PLANES": 1, "BLOCK": 1024}),
    *(
        _sparse(kernel, dtype, dim, tile, bias)
        for dtype, dim, tile, bias in (
            (torch.bfloat16, 64, 64, False),
            (torch.bfloat16, 128, 64, True),
            (torch.bfloat16, 256, 64, True),
            (torch.bfloat16, 64, 16, True),
            (torch.float32, 64, 64, True),
            (torch.float32, 128, 64, True),
            (torch.float32, 256, 64, True),
        )
        for kernel in (sparse._forward, sparse._query_grads, sparse._key_grads)
    ),
    (fused._add_norm, _FUSED, {"ADDS": True, "DROPS": True, "NORM": 1, "BLOCK": 4096, "num_warps": 8}),
    (fused._add_norm_backward, _FUSED, {"inverse_weight": None, "DROPS": True, "NORM": 1, "BLOCK": 4096, "num_warps": 16}),
    (fused._add_norm_backward, _FUSED, {"sum_grad": None, "dx": None, "DROPS": False, "NORM": 2, "BLOCK": 1024}),
    *((fused._activate_backward, _FUSED, {"KIND": kind, "BLOCK": 1024}) for kind in range(4)),
    (fused._activate, _FUSED, {"up": None, "KIND": 1, "BLOCK": 1024}),
    (fused._row_loss, _FUSED, {"BLOCK": 4096, "num_warps": 8}),
    (fused._row_grad, _FUSED, {"BLOCK": 4096, "num_warps": 8}),
    (fused._rotate, _FUSED, {"BACK": True, "DIM": 128, "HALF": 32, "HEADS": 8, "BLOCK": 32, "REST": 64}),
]
TRAINING = ("sparse", "fused")
_INTEGERS = {"positions", "angles", "stops", "slots", "tables", "tile_row", "tile_length", "tile_table"}


def type_of(name: str, kernel: Any, types: dict[str, Any]) -> Any:
    if kernel in (flat._step, flat._reduce):
        arrays = ("master", "grad", "first", "second", "out", "source", "squares")
        return types.get(name, FP32) if name in arrays else "i32" if name == "num_elements" else "fp32"
    if name == "eps" or (name == "scale" and kernel in (attention._attend, rows._add_norm)):
        return "fp32"
    is_int = name.startswith("num_") or name.endswith("_stride") or name == "size"
    return types.get(name) or (INT if name in _INTEGERS else "i32" if is_int else FP32)


def main() -> None:
    for kernel, types, settings in KERNELS:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in settings else type_of(name, kernel, types) for name in names}
        constants = {(i,): settings[name] for i, name in enumerate(names) if name in settings}
        parts = {(i,): signature[name] for i, name in enumerate(names)}
        parts |= {(*i, j): each for i, kinds in list(parts.items()) if isinstance(kinds, tuple) for j, each in enumerate(kinds)}
        constants |= {at: None for at, kind in parts.items() if kind == "constexpr" and len(at) > 1}
        aligned = {at: [["tt.divisibility", 16]] for at, kind in parts.items() if isinstance(kind, str) and kind[0] in "*i"}
        options = {name: value for name, value in settings.items() if name not in names}
        module = kernel.fn.__module__.rpartition(".")[2]
        options["enable_fp_fusion"] = module in TRAINING
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        kernel_code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        code = kernel_code.asm["ptx"]
        products = "fp32" if FP32 in (signature.get("weight"), signature.get("keys")) else "16 bits"
        report = {"module": module, "kernel": kernel.__name__, "shared": kernel_code.metadata.shared, "fused": "fma.rn.f32" in code}
        report["products"] = products
        print(json.dumps(report | {"wgmma": "wgmma.mma_async" in code, "mma": "mma.sync" in code}), flush=True)


if __name__ == "__main__":
    main()
