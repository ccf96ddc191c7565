"""Kernels for NVIDIA GPUs, in Triton: what `inference.cuda` runs a decoder with. Importing the modules needs triton.

    linear.py      products of bf16, fp16, fp32, int8 and int4 matrices
    attention.py   paged attention, over fixed ranges of positions, and their sum
    rows.py        residual + RMSNorm; QK-norm + rotary + write into the cache; the gate of an MLP
    tiles.py       what they share

With TRITON_INTERPRET=1 in the environment before triton is first imported they run on a CPU's tensors, slowly: so they are
tested where there is no GPU. Their torch twin is `inference.decoder`.

[Note: Batch invariance on CUDA] A row's result is the same bits whatever else is in the batch and however a prompt was split,
because what a kernel adds, and in which order, depends on the matrix or on the position alone:

- A product's features are cut into slices, as many as the matrix's shape says. Few rows: a slice is a program's work, and
  writes a *plane* of partial sums, which whoever reads the result adds in order. Many rows: a program computes all slices, each
  in an accumulator of its own, and adds them in the same order.
- The left operand of every matrix instruction is the weights, or keys, or values, of which a tile has as many rows whatever the
  batch: 64 or 128, or a head's features. Rows of the batch are its right operand, whose width chooses among instructions (wgmma
  m64 n8..256 k16) that add alike; a left operand of few rows would choose others.
- Attention is computed by ranges of positions (tiles.py), each from nothing, and the ranges are added in order. Tiles that are
  wholly masked change no bit: their weights are exactly 0, and the maximum stays.
- Multiplications and additions are not contracted (`enable_fp_fusion=False`): a compiler might do it in one variant only.

That one family's instructions add alike whatever their width is the hardware's doing: tests/gpu looks at the bits.

cuBLAS is not used, not even for large prompts, where it may well be faster: it chooses its order of addition by the number of
rows.
"""
