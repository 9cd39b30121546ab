"""Engine: a model with a forward pass and an update. The only caller of megatron's schedules.

Every rank calls the same methods with its data-parallel share of a batch. Tensor, pipeline, sequence and data
parallelism, micro-batches and the distributed optimizer are hidden here.

A loss is a pure function `loss(outputs, rows) -> (sum, count, metrics)`: the head's outputs by name, (B, R) each, and
the rows they belong to; `sum` a differentiable scalar, `count` the number of tokens (or pairs) it sums over, and
metrics as {name: (sum, count) | Variance | Max | Min}. The engine divides once, by the count over all micro-batches and
data-parallel ranks, so gradients do not depend on how a batch is cut.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import metrics, optim
from megarlhf.batch import Sequences
from megarlhf.cluster import backend, gradients
from megarlhf.cluster.offload import Hosted, Named, named_weights
from megarlhf.cluster.parallel import Topology, seed_generators
from megarlhf.config import UserError
from megarlhf.metrics import Mean, Metric
from megarlhf.optim import OptimizerConfig
from megarlhf.stream import Stream, cut, num_tokens, stream_of

Outputs = dict[str, Tensor]
Loss = Callable[[Outputs, Any], tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor] | Metric]]]
Part = tuple[Sequences, Loss | None, dict[str, Any]]  # rows, loss, options of the head


class _OnDevice(dict):
    """Outputs with a device: megatron's schedules ask the output of a mixture of experts for it."""

    device = property(lambda self: next(iter(self.values())).device)


class Engine(Hosted):
    """One model on this rank: its chunks (one, or several with the interleaved schedule) and, if it trains, its
    optimizer, which changes the parameters that require gradients. Build it with `models.build.build`."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        config: TransformerConfig,
        topology: Topology,
        *,
        role: str,
        micro_batch_tokens: int,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        seed: int = 0,
        trains_all: bool = True,
        saves: Callable[[str], bool] | None = None,
        owns: Callable[[str], bool] | None = None,
    ):
        super().__init__()
        self.modules = chunks  # the bare models, for weights and checkpoints
        self.chunks = chunks  # what the schedules run
        self.config = config
        self.topology = topology
        self.messages = P2PCommunicator(topology.pipeline_group, config)
        self.role = role  # for messages
        self.micro_batch_tokens = micro_batch_tokens
        self.optimizer_config = optimizer
        self.optimizer = None
        self.total_steps = total_steps
        self.seed = seed
        self.trains_all = trains_all  # no weight is frozen
        self.saves = saves or (lambda name: True)  # which weights its checkpoints hold, by name
        self.owns = owns or (lambda name: True)  # which weights are not another engine's, by name
        self.base: Any = None  # what names the weights that they do not hold; written beside them
        # Updates so far, skipped ones included: the position in the schedule and in the data. (Adam has its own count.)
        self.steps = 0
        self.skipped = 0  # in a row, up to now
        self.replays = False  # tokens go to the experts that their rows name; otherwise to those that it chooses
        if optimizer is not None:
            self._make_trainable()

    def _make_trainable(self) -> None:
        parallel = self.topology.parallel
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            use_distributed_optimizer=parallel.distributed_optimizer,
        )
        self.chunks = [
            DistributedDataParallel(
                config=self.config,
                ddp_config=ddp,
                module=module,
                disable_bucketing=i > 0,
                pg_collection=self.topology.groups,
            )
            for i, module in enumerate(self.modules)
        ]
        gradients.share(self.chunks)
        self.optimizer = optim.build(self.chunks, self.optimizer_config, self.topology, self.config.params_dtype)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

        def per_chunk(name: str):
            functions = [getattr(chunk, name) for chunk in self.chunks]
            return functions if len(functions) > 1 else functions[0]

        if parallel.overlap_grad_reduce:
            self.config.no_sync_func = per_chunk("no_sync")
            if len(self.chunks) > 1:
                self.config.grad_sync_func = per_chunk("start_grad_sync")
        if parallel.overlap_param_gather:
            self.config.param_sync_func = per_chunk("start_param_sync")
        if self.optimizer_config.state_on_host:
            self.keep_on_host("optimizer")

    @property
    def parts(self) -> dict[str, Callable[[], Named]]:
        parts = {"weights": lambda: named_weights(self.modules, self.owns)}
        if self.optimizer is not None:
            parts["optimizer"] = lambda: optim.state_of(self.optimizer, self.modules)
        return parts

    def head_weight(self) -> Tensor:
        """The word head's weight, on the last stage."""
        return self.modules[-1].head_weight().detach()

    # ------------------------------------------------------------------------------------------- the two verbs

    def forward(self, batch: Sequences, **options) -> Outputs:
        """The head's outputs for this data-parallel rank's rows, (B, R) each, 0 where a token does not count, on every
        rank of its model; no gradients, no dropout. `options` go to the head (temperature, with_entropy)."""
        assert len(batch), "no rows"
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            cuts, parts = self._run((batch, None, options), forward_only=True)
        outputs = {}
        if parts:
            order, parts = torch.cat(cuts[0]).to(backend.device()), parts[-len(cuts[0]) :]  # those before are empty
            for name in parts[0]:
                value = torch.cat([part[name] for part in parts])
                outputs[name] = torch.empty_like(value).index_copy_(0, order, value)
        return self._from_last_stage(outputs)

    def step(self, batch: Sequences, loss: Loss, *more: Part, **options) -> dict[str, Metric]:
        """One optimizer update on this data-parallel rank's rows. Returns the metrics of the global batch, on every
        rank, with `grad_norm`, `lr` and `skipped`, which is 1 if the gradients were not finite and nothing changed.
        `more`: further (batch, loss, options) whose gradients go into the same update. The sums of all are divided by
        the sum of all counts.

        Raises UserError, on every rank, when `patience` updates in a row were skipped.
        """
        gradients.allocate()
        with self.present("weights", written=True):
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._seed_dropout()
            # `batch` comes last: overlapped reductions wait for a gradient of every weight in the last micro-batch, and
            # the loss of a further part need not read all heads.
            _, parts = self._run(*more, (batch, loss, options))
            rate = optim.set_step(self.optimizer, self.optimizer_config, self.steps, self.total_steps)
            with self.present("optimizer", written=True):
                grad_norm = self._update()
            if self.is_on_host("weights"):
                self.sync_params()  # what leaves must be whole
        gradients.free()
        self.steps += 1
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1
        if self.skipped >= self.optimizer_config.patience:
            raise UserError(
                f"{self.role}: {self.skipped} updates in a row, up to update {self.steps}, were skipped, because their "
                f"gradients are not finite (norm {grad_norm}); resume from an earlier checkpoint with a lower "
                "optimizer.lr, or look at the data and scores of these updates"
            )
        numbers = {"grad_norm": grad_norm, "lr": rate, "skipped": float(self.skipped > 0)}
        return self._reduce(parts) | {name: Mean(value, 1) for name, value in numbers.items()}

    def evaluate(self, batch: Sequences, loss: Loss, **options) -> dict[str, Metric]:
        """The metrics of `loss` on the global batch, on every rank, without an update. Takes any number of rows."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._reduce(self._run((batch, loss, options), forward_only=True)[1])

    @torch.no_grad()
    def follow(self, other: Engine, decay: float) -> None:
        """Move this engine's weights towards those of another engine of the same layout: decay * own + (1 - decay) *
        other. The other may have another precision, and so other layers: Transformer Engine's keep weights in another
        order."""
        other.sync_params()
        with self.present("weights", written=True):
            for module, leader in zip(self.modules, other.modules, strict=True):
                own, its = (
                    {model.global_name(name): weight for name, weight in model.named_parameters()}
                    for model in (module, leader)
                )
                assert own.keys() == its.keys(), own.keys() ^ its.keys()
                for name, weight in own.items():
                    weight.lerp_(its[name].to(weight.dtype), 1 - decay)

    def update_slow_copies(self, rate: float) -> None:
        """Move the slow copies that heads have of their weights: (1 - rate) * own + rate * the weight."""
        self.sync_params()
        for part in (part for module in self.modules for part in module.children()):
            if hasattr(part, "update_slow_copies"):
                part.update_slow_copies(rate)

    # ------------------------------------------------------------------------------------------- how

    def _run(self, *parts: Part, forward_only: bool = False) -> tuple[list[list[Tensor]], list]:
        """Run megatron's schedule over the micro-batches of all parts. Returns the rows of each part's micro-batches,
        as indices, and one item a micro-batch on the last stage, [] on the others: the loss's metrics, or without a
        loss the outputs.

        All data-parallel ranks run the same number of micro-batches. Empty ones come first: overlapped reductions wait
        for the last.
        """
        device = backend.device()
        if not self.replays:
            parts = [(replace(batch, experts=None), loss, options) for batch, loss, options in parts]
        here = [batch.on_host() for batch, _, _ in parts]
        cuts = [cut(rows, self.micro_batch_tokens) for rows in here]
        count = self._agreed(sum(len(found) for found in cuts))
        work = []  # (the host's rows; all rows on the device, and which of them; loss, options)
        for (batch, loss, options), rows, found in zip(parts, here, cuts, strict=True):
            batch = batch.to(device)
            work += [(rows.select(index), batch, index.to(device), loss, options) for index in found]
        first, loss, options = parts[0]
        empty = (here[0].emptied(), first.emptied().to(device), slice(None), loss, options)
        work = [empty] * (count - len(work)) + work
        length = self._rounded(max(int(num_tokens(rows).sum()) for rows, *_ in work))  # of the messages between stages
        both = options.get("branched", False) and self.modules[0].branch.wide  # two hidden states of each token

        def micro_batches() -> Iterator[tuple[Stream, Sequences, Loss | None, dict[str, Any]]]:
            for rows, batch, index, loss, options in work:
                own = length if self.topology.parallel.pipeline > 1 else self._rounded(int(num_tokens(rows).sum()))
                yield stream_of(rows, own).to(device), batch.select(index), loss, options

        def forward_step(iterator, model: torch.nn.Module):
            stream, rows, loss, options = next(iterator)

            def finish(outputs: Outputs, non_loss_data: bool = False):
                if non_loss_data:
                    return outputs
                total, count, values = loss(outputs, rows)
                return total, count.to(torch.int), metrics.of_loss(values)

            outputs = model(stream, **rows.model_inputs, **options)
            return _OnDevice(outputs) if isinstance(outputs, dict) else outputs, finish

        iterators = [micro_batches() for _ in self.chunks]
        parallel = self.topology.parallel
        schedule = get_forward_backward_func(pp_size=parallel.pipeline, vp_size=parallel.virtual_pipeline)
        with self.present("weights"):
            found = schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(work),
                seq_length=2 * length if both else length,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=parts[0][1] is None,
                p2p_communicator=self.messages,
                pg_collection=self.topology.groups,
            )
        return cuts, found

    def _agreed(self, count: int) -> int:
        """The number of micro-batches that all data-parallel ranks run: the largest, as the schedule can run it."""
        if self.topology.data_size > 1:
            largest = torch.tensor(count, device=backend.device())
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.topology.data_group)
            count = int(largest)
        multiple = self.topology.parallel.micro_batch_multiple
        return -(-count // multiple) * multiple

    def _rounded(self, tokens: int) -> int:
        """A number of tokens that sequence parallelism can cut into equal parts, and that suits a GPU's kernels."""
        parts = self.topology.parallel.tensor if self.config.sequence_parallel else 1
        parts *= 8 if backend.on_cuda() else 1
        return -(-tokens // parts) * parts

    def _update(self) -> float:
        """Clip and apply the gradients. Returns their norm before clipping. If it is not finite, the weights stay as
        they are."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            limit = self.optimizer_config.clip_grad
            if 0 < limit < norm:
                parameters = [p for part in self.optimizer.chained_optimizers for p in part.get_parameters()]
                if own := [p.grad for p in parameters if p.grad is not None]:  # a stage may train nothing
                    torch._foreach_mul_(own, limit / (norm + 1e-6))
            self.optimizer.step_with_ready_grads()
        return norm

    def _reduce(self, parts: list[dict[str, Metric]]) -> dict[str, Metric]:
        """Sum metrics over micro-batches, then over data-parallel ranks; send them from the last stage to every
        stage."""
        total = metrics.add([{name: metric.map(float) for name, metric in part.items()} for part in parts])
        total = metrics.all_reduce(total, self.topology.data_group, backend.device())
        if self.topology.parallel.pipeline > 1:
            box = [total]
            dist.broadcast_object_list(box, src=self.topology.last_stage_rank, group=self.topology.pipeline_group)
            total = box[0]
        return total

    def _from_last_stage(self, outputs: Outputs) -> Outputs:
        if self.topology.parallel.pipeline == 1:
            return outputs
        source, group = self.topology.last_stage_rank, self.topology.pipeline_group
        box = [{name: (value.shape, value.dtype) for name, value in outputs.items()}]
        dist.broadcast_object_list(box, src=source, group=group)
        for name, (shape, dtype) in box[0].items():
            if name not in outputs:
                outputs[name] = torch.empty(shape, dtype=dtype, device=backend.device())
            outputs[name] = outputs[name].contiguous()
            dist.broadcast(outputs[name], src=source, group=group)
        return outputs

    def _seed_dropout(self) -> None:
        """Dropout depends on (seed, update, pipeline and data rank) alone, so that a resumed run draws the same numbers
        and no generator state is saved. Megatron's tracker gives tensor-parallel ranks different seeds."""
        key = (self.seed, self.steps, self.topology.pipeline_rank, self.topology.data_rank)
        seed_generators(self.topology, zlib.crc32(repr(key).encode()))

    def sync_params(self) -> None:
        """Gather the weights if their gather would otherwise overlap with the next forward pass."""
        if self.optimizer is not None and self.topology.parallel.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def reload_main_weights(self) -> None:
        """Let the optimizer's fp32 main weights, if there are any, follow weights that others have written."""
        if self.optimizer is not None:
            with self.present(written=True):
                self.optimizer.reload_model_params()

    # ------------------------------------------------------------------------------------------- checkpoints

    def sharded_state(
        self, *, loading: bool, weights_only: bool = False, only: Callable[[str], bool] | None = None
    ) -> dict[str, Any]:
        """Weights (those whose names `only` admits; default: those that its checkpoints hold) and, if this engine
        trains, optimizer and counts of updates, as megatron's sharded state dict."""
        self.sync_params()
        only = only or self.saves
        state = {
            part: {name: value for name, value in weights.items() if only(name)}
            for part, weights in self._sharded_weights(self._metadata()).items()
        }
        if self.optimizer is not None and not weights_only:
            if not loading:
                optim.agree_on_count(self.optimizer)
            with optim.held_once(self.optimizer):
                # Megatron stacks the same weight of all layers. Where some layers train, each has a name of its own.
                weights = self._sharded_weights(self._metadata() | {"non_homogeneous_layers": not self.trains_all})
                state["optimizer"] = self.optimizer.sharded_state_dict(
                    weights, is_loading=loading, metadata=self._metadata()
                )
            state |= {"steps": self.steps, "skipped": self.skipped}
        return state

    def _sharded_weights(self, metadata: dict[str, Any]) -> dict[str, Any]:
        if len(self.modules) == 1:
            return {"model": self.modules[0].sharded_state_dict(metadata=metadata)}
        return {f"model{i}": module.sharded_state_dict(metadata=metadata) for i, module in enumerate(self.modules)}

    def _metadata(self) -> dict[str, Any]:  # a fresh one each call: megatron may add to it
        return {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self.topology.groups.dp_cp,
        }

    def load_sharded_state(
        self, state: dict[str, Any], *, weights_only: bool, only: Callable[[str], bool] | None = None
    ) -> None:
        """Take what `sharded_state` with the same arguments described."""
        only = only or self.saves
        for i, module in enumerate(self.modules):
            weights = state["model" if len(self.modules) == 1 else f"model{i}"]
            missing, unexpected = module.load_state_dict(weights, strict=False)
            missing = [name for name in missing if not name.endswith("_extra_state") and only(name)]
            assert not missing and not unexpected, (missing, unexpected)
        if weights_only:
            self.reload_main_weights()
        elif self.optimizer is not None:
            with optim.held_once(self.optimizer):
                optim.load_state(self.optimizer, state["optimizer"])
            self.steps = state["steps"]
            self.skipped = state.get("skipped", 0)  # older checkpoints do not have it
