"""The word embedding, with a backward that allocates no gradient of the whole [V, H] for a few hundred tokens."""

from __future__ import annotations

from megatron.core import tensor_parallel
from torch import Tensor

from megarlhf.cluster import operations


class WordEmbedding(tensor_parallel.VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding; `GPT` changes the class of megatron's module to this one."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, S) -> [B, S, H], or this rank's [S/TP, B, H] under sequence parallelism."""
        if self.tp_group.size() == 1:
            return operations.embed(self.weight, ids)
        local = ids - self.vocab_start_index
        here = (local >= 0) & (local < self.num_embeddings_per_partition)
        rows = operations.embed(self.weight, local.where(here, 0)) * here[..., None]
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
