"""Log-probabilities, entropy and KL over a vocabulary, split over tensor-parallel ranks, in the fewest bytes moved.

Public, all of hidden states and the head's weight: `linear_logprobs`, `label_logits`, `linear_policy_ref_kl` and, for
sampling, `linear_logits`. `tests/reference.py` is their specification. `linear` and `kl` hold the collectives and the
autograd function; the row kernels under them (`torch_rows`, `triton_rows`) know one rank's columns alone. Nothing of
Megatron or of the rest of megarlhf is imported here, but on a CPU the buffers of `megarlhf/cpu/memory.py`.
"""

from megarlhf.kernels.kl import linear_policy_ref_kl
from megarlhf.kernels.linear import LogprobOutput, label_logits, linear_logprobs
from megarlhf.kernels.products import linear_logits

__all__ = ["LogprobOutput", "label_logits", "linear_logits", "linear_logprobs", "linear_policy_ref_kl"]
