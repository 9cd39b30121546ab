"""What a job computes, as the cost model reads it: no paths, no data, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megarlhf.cluster.parallel import ParallelConfig
from megarlhf.config import UserError
from megarlhf.models.model_config import LoraConfig
from megarlhf.models.spec import Architecture

# Groups of ranks, by name. embedding: first and last stage, which hold a tied embedding each; model: all ranks of one
# copy of the model; ring: first and last stage, for sampled tokens; expert: ranks that share experts out; expert_data:
# ranks of a stage that hold the same experts.
GROUPS = ("tensor", "pipeline", "data", "embedding", "model", "ring", "world", "expert", "expert_data")
Device = Literal["cpu", "cuda"]
SIZES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Model:
    """One model of a job."""

    role: str  # actor, critic, reference, reward 0, ...
    architecture: Architecture
    head: str  # models/gpt.py: logprobs, values, scores, logprobs+values, logprobs+values+q
    trains: bool = False
    trained_layers: int | None = None  # from the top; None: all
    lora: LoraConfig | None = None
    weights_on_host: bool = False  # on the device only while they are used
    optimizer_on_host: bool = False
    borrows: bool = False  # frozen weights are another model's (adapters; the trunk of a hydra reference)
    dtype: Literal["bf16", "fp32"] | None = None  # default: the job's
    trains_router: bool = True  # of a mixture of experts, where it trains
    replays: bool = False  # the experts that its sampler used are recorded, and used again
    mlp_values: bool = False  # its value head has a hidden layer of twice the width

    @property
    def words(self) -> bool:
        """Whether it has an output layer."""
        return self.head.startswith("logprobs")

    @property
    def scalar(self) -> bool:
        return self.head != "logprobs"

    @property
    def hydra(self) -> bool:
        """Whether it is a reference that grows from the actor's trunk, of as many layers as train."""
        return self.borrows and not self.trains and self.trained_layers is not None

    @property
    def q_heads(self) -> int:
        """ILQL's: heads as large as an output layer."""
        return 2 if self.head.endswith("+q") else 0

    @property
    def outputs(self) -> int:
        """Numbers a token that a forward pass returns: Q heads give a Q value and a log-prob each, and the slow one."""
        return self.words + self.scalar + (2 * self.q_heads + 1 if self.q_heads else 0)


@dataclass(frozen=True)
class Shape:
    """Tokens of a step. Rows are counted at their full length: an upper bound where texts are shorter."""

    rows: int  # of the global batch
    length: int  # tokens a row
    counted: int  # tokens a row that the loss reads: of responses, or 1 of a row that gets one score
    micro_batch_tokens: int
    # responses to a prompt, in programs that sample; in others rows that stay on one rank
    samples: int = 1
    slots: int | None = None  # of the sampler, a stage; None: as it chooses on this device
    epochs: int = 1
    minibatches: int = 1
    # (key of the configuration, rows) that data-parallel ranks share evenly beside the batch: of text, of samples
    shared: tuple[tuple[str, int], ...] = ()

    @property
    def prompt(self) -> int:
        return self.length - self.counted


@dataclass(frozen=True)
class Job:
    """A program on a layout. `dataclasses.replace` makes variants: of `parallel`, `recompute`, `shape`."""

    program: str
    models: tuple[Model, ...]  # the actor, or the model of an offline program, comes first
    shape: Shape
    parallel: ParallelConfig
    world_size: int
    dtype: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    online: bool = True  # whether it samples
    device: Device = "cuda"

    @property
    def data(self) -> int:
        """Data-parallel ranks. Raises UserError if the ranks cannot be divided so."""
        return self.parallel.data(self.world_size)

    @property
    def rows_here(self) -> int:
        """Rows of a step on one data-parallel rank."""
        return -(-self.shape.rows // self.data)

    @property
    def parts(self) -> int:
        """Parts into which sequence parallelism cuts a stream."""
        return self.parallel.tensor if self.parallel.sequence else 1

    def check_batch(self) -> None:
        """Refuse (UserError) a batch that the programs do not share among the ranks."""
        shape, key = self.shape, "batch_size" if self.online else "global_batch_size"
        unit = math.lcm(self.data * shape.minibatches, self.data * shape.samples)
        if shape.rows % unit:
            raise UserError(
                f"training.{key}: {shape.rows} is not a multiple of {unit}, by {self.data} data-parallel ranks with "
                f"{shape.minibatches} minibatches, and {shape.samples} rows that stay together; change it or the layout"
            )
        for name, rows in shape.shared:
            if rows % self.data:
                raise UserError(
                    f"{name}: {rows} is not a multiple of {self.data} data-parallel ranks; change it or the layout"
                )

    @property
    def trained(self) -> tuple[Model, ...]:
        return tuple(model for model in self.models if model.trains)

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.parallel.tensor * self.data // self.parallel.expert

    @property
    def mixtures(self) -> tuple[str, ...]:
        """Roles of the models that are mixtures of experts."""
        return tuple(model.role for model in self.models if model.architecture.num_experts)

    def size(self, model: Model) -> int:
        """Bytes of one of a model's numbers."""
        return SIZES[model.dtype or self.dtype]

    def beside(self, model: Model) -> bool:
        """Whether a model's forward pass is one with the actor's, which has the trunk: a hydra reference's, where
        responses are sampled. Offline programs run a reference before the actor."""
        return self.online and model.hydra

    def branch(self, model: Model, stage: int) -> list[int]:
        """Of `layer_numbers` those that a model does not share with the actor's trunk."""
        lowest = model.architecture.num_layers - (model.trained_layers or model.architecture.num_layers)
        numbers = self.layer_numbers(model, stage)
        return [number for number in numbers if number >= lowest] if self.beside(model) else numbers

    def reached(self, model: Model, number: int) -> bool:
        """Whether a layer of a model that trains has a backward pass. Every chunk of layers but the first one hands
        gradients to the chunk before, also where none of its own layers train."""
        a = model.architecture
        lowest = a.num_layers - (model.trained_layers or a.num_layers)
        return number >= min(lowest, a.num_layers // (self.parallel.pipeline * self.parallel.chunks))

    def model(self, role: str) -> Model | None:
        return next((model for model in self.models if model.role == role), None)

    def layers(self, model: Model) -> int:
        """Layers of one stage."""
        return model.architecture.num_layers // self.parallel.pipeline

    def layer_numbers(self, model: Model, stage: int) -> list[int]:
        """The layers of a stage, counted over the whole model."""
        chunks, stages = self.parallel.chunks, self.parallel.pipeline
        each = model.architecture.num_layers // (stages * chunks)
        return [(chunk * stages + stage) * each + layer for chunk in range(chunks) for layer in range(each)]

    def group_size(self, group: str) -> int:
        """Ranks of a group (GROUPS)."""
        sizes = {"tensor": self.parallel.tensor, "pipeline": self.parallel.pipeline, "data": self.data,
                 "embedding": min(2, self.parallel.pipeline), "ring": min(2, self.parallel.pipeline),
                 "model": self.parallel.model, "world": self.world_size,
                 "expert": self.parallel.expert, "expert_data": self.expert_data}  # fmt: skip
        return sizes[group]


def micro_batches(rows: int, length: int, budget: int) -> dict[int, int]:
    """{rows of a micro-batch: how many} of rows of one length, as `stream.cut` divides them."""
    fit = max(1, budget // length)
    count = -(-rows // fit)
    small, more = divmod(rows, count)
    return {size: times for size, times in ((small + 1, more), (small, count - more)) if times and size}
