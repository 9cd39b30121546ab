"""Log-probabilities, entropy and KL over a vocabulary, split over tensor-parallel ranks, in the fewest bytes moved.

Public: `logprobs` and `policy_ref_kl` of given logits; `linear_logprobs`, `linear_policy_ref_kl` and, for sampling,
`linear_logits` of hidden states and the head's weight. `reference` is their specification. `vocab_parallel` and
`linear` hold the autograd functions and the collectives; the row kernels under them (`torch_rows`, `triton_rows`) know
one rank's columns alone. Nothing of Megatron or of the rest of megarlhf is imported here.
"""

from megarlhf.kernels.linear import linear_logits, linear_logprobs, linear_policy_ref_kl
from megarlhf.kernels.shard import KLOutput, LogprobOutput
from megarlhf.kernels.vocab_parallel import logprobs, policy_ref_kl

__all__ = [
    "KLOutput",
    "LogprobOutput",
    "linear_logits",
    "linear_logprobs",
    "linear_policy_ref_kl",
    "logprobs",
    "policy_ref_kl",
]
