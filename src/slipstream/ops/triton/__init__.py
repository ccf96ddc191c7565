"""Triton kernels for NVIDIA GPUs: for the decoder in `inference.cuda`, and for training. Importing the modules needs triton.

    linear.py      products of bf16, fp16, fp32, int8 and int4 matrices
    attention.py   paged attention over fixed ranges of positions, and their combination
    rows.py        residual + norms; norms of q and k + rotary + write into the cache; activation of an MLP
    tiles.py       shared device functions
    sparse.py      block-sparse attention of training, forward and backward
    fused.py       passes of training's transformer layers, forward and backward
    flat.py        a training step's passes over flat arrays: optimizers, reduced gradients (`ops.gpu` decides)

If TRITON_INTERPRET=1 is set before triton is first imported, they run on CPU tensors, slowly: this is how they are tested without a
GPU. Their torch twin is `inference.decoder`; sparse.py, fused.py and flat.py name their own.

[Note: Batch invariance on CUDA] A row's result is bit-identical whatever else is in the batch and however a prompt was split:
the terms of every sum and their order depend only on the matrix's shape or on the position.

- A product's features are cut into slices, whose number depends only on the matrix's shape. With few rows, each program computes
  one slice and writes a *plane* of partial sums, and the kernel that reads the result adds the planes in order. With many rows, a
  program computes all slices, each in its own accumulator, and adds them in the same order.
- The left operand of every matrix instruction is the weights, keys or values, whose tile has a fixed number of rows: 64 or 128, or
  a head's features. Rows of the batch are the right operand. Its width selects among instructions (wgmma m64 n8..256 k16) that add
  in the same order; a left operand with few rows would select others.
- Attention is computed per range of positions (tiles.py), each with a fresh accumulator, and the ranges are added in order. Fully
  masked tiles change no bit: their weights are exactly 0, and the maximum stays.
- Multiplications and additions are not fused (`enable_fp_fusion=False`): a compiler might fuse them in one variant only.

That instructions of one family add in the same order at every width is a property of the hardware: tests/gpu compares the bits.

cuBLAS is not used, even for large prompts, where it may be faster: its order of addition depends on the number of rows.
"""
