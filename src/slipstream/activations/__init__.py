"""How a forward keeps activations for its backward: recomputed, in host memory, or computed in tiles."""

from slipstream.activations.recompute import HostMemory, checkpoint
from slipstream.activations.tiled import TiledLinear, fused_linear_cross_entropy, tiled_mlp

__all__ = ["HostMemory", "TiledLinear", "checkpoint", "fused_linear_cross_entropy", "tiled_mlp"]
