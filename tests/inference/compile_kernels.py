"""Compiles Triton's kernels for Hopper, which needs no GPU: `python -m tests.inference.compile_kernels`. A line of JSON for each.

In a process of its own: with TRITON_INTERPRET=1, which the tests have, nothing is compiled.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.ops.triton import attention, flat, linear, rows

BF16, FP32, INT = "*bf16", "*fp32", "*i32"
_ATTEND = {"CAP": 0.0, "WINDOW": 64, "KV_HEADS": 8, "GROUP": 4, "PADDED": 4, "DIM": 64, "BLOCK_DIM": 64, "BLOCK_SIZE": 16}
_LINEAR = {"bias": None, "SLICE": 512, "GROUP": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_FEW, _MANY = {"TOGETHER": 1, "ROWS": 16}, {"TOGETHER": 4, "ROWS": 128, "COLUMNS": 128, "num_warps": 8}
_PLAIN, _CODES = {"scale": None, "low": None, "FEATURES": 64}, {"FEATURES": 128}
_HEADS = {"HEADS": 32, "DIM": 64}
# Kernel, the types of its pointers (fp32 unless said), its constants and options.
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (linear._linear, {"x": BF16, "weight": BF16}, _LINEAR | _PLAIN | _FEW),
    (linear._linear, {"x": BF16, "weight": BF16}, _LINEAR | _PLAIN | _MANY),
    (linear._linear, {"x": BF16, "weight": "*i8"}, _LINEAR | _CODES | _FEW | {"low": None}),
    (linear._linear, {"x": BF16, "weight": "*u8"}, _LINEAR | _CODES | _MANY),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | {"LANES": 16}),
    (attention._attend, dict.fromkeys(("q", "keys", "values"), BF16), _ATTEND | {"LANES": 64}),
    (attention._combine, {"out": BF16}, _HEADS | {"WINDOW": 64, "BLOCK_DIM": 64}),
    (rows._add_norm, {"out": BF16}, {"PLANES": 4, "BLOCK": 2048}),
    (rows._place, dict.fromkeys(("q", "keys", "values"), BF16), _HEADS | {"PLANES": 4, "KV_HEADS": 8, "HALF": 32, "BLOCK": 64}),
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
    (rows._gate, {"out": BF16}, {"ACTIVATION": "gelu", "PLANES": 1, "BLOCK": 1024}),
]
_INTEGERS = {"positions", "slots", "tables", "tile_row", "tile_length", "tile_table"}


def type_of(name: str, kernel: Any, types: dict[str, str]) -> str:
    if kernel in (flat._step, flat._reduce):
        arrays = ("master", "grad", "first", "second", "out", "source", "squares")
        return types.get(name, FP32) if name in arrays else "i32" if name == "num_elements" else "fp32"
    if name == "eps" or (name == "scale" and kernel is attention._attend):
        return "fp32"
    is_int = name.startswith("num_") or name.endswith("_stride") or name == "size"
    return types.get(name) or (INT if name in _INTEGERS else "i32" if is_int else FP32)


def main() -> None:
    for kernel, types, settings in KERNELS:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in settings else type_of(name, kernel, types) for name in names}
        constants = {(i,): settings[name] for i, name in enumerate(names) if name in settings}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
        options = {name: value for name, value in settings.items() if name not in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        kernel_code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"enable_fp_fusion": False})
        code = kernel_code.asm["ptx"]
        report = {"kernel": kernel.__name__, "shared": kernel_code.metadata.shared, "fused": "fma.rn.f32" in code}
        print(json.dumps(report | {"wgmma": "wgmma.mma_async" in code, "mma": "mma.sync" in code}), flush=True)


if __name__ == "__main__":
    main()
