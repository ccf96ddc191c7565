"""DeepSpeed-MII's servers, by Slipstream."""
