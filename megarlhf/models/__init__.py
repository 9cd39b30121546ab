"""Models: an architecture, the Megatron module that computes it, its heads, and the Engine that runs it."""
