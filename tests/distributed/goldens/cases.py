"""The golden cases: tiny models of every family with fixed weights, fixed batches and a fixed loss; what an engine
makes of them, as arrays; and the files. The numbers come from numpy's RandomState, whose streams numpy never changes.

The files hold what the padded forward pass computed on one rank. An implementation of another kind must give the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarlhf.batch import Sequences
from megarlhf.cluster.parallel import Topology
from megarlhf.models.build import Role, build
from megarlhf.models.spec import Architecture, RopeScaling, Shape
from megarlhf.optim import OptimizerConfig
from tests.distributed.layouts import full_weights, layout, set_full_weights, share

DIRECTORY = Path(__file__).parent
TOLERANCE = 1e-5  # of the largest entry of an array, all in float32
VOCABULARY = 200
LLAMA = Architecture(
    "llama",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=32,
)
GPT2 = dataclasses.replace(
    LLAMA, family="gpt2", num_query_groups=4, normalization="LayerNorm", activation="gelu_tanh", gated_mlp=False,
    linear_bias=True, position_embedding="learned", tie_embeddings=True,
)  # fmt: skip
NEOX = dataclasses.replace(
    GPT2, family="gpt_neox", activation="gelu", position_embedding="rope", rotary_percent=0.25, tie_embeddings=False,
    parallel_residual=True,
)  # fmt: skip
FALCON = dataclasses.replace(
    NEOX, family="falcon", num_query_groups=2, linear_bias=False, rotary_percent=1.0, tie_embeddings=True
)
ARCHITECTURES = {
    "llama": LLAMA,
    # half of the frequencies are stretched or blended
    "llama31": dataclasses.replace(
        LLAMA, rope_scaling=RopeScaling(4.0, 1.0, 4.0, original_max_position_embeddings=16), tie_embeddings=True
    ),
    "mistral": dataclasses.replace(LLAMA, family="mistral", head_dim=12),
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
    "gemma": dataclasses.replace(
        LLAMA, family="gemma", head_dim=16, activation="gelu_tanh", tie_embeddings=True, zero_centered_norm=True,
        scale_embedding=True,
    ),
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "falcon_7b": dataclasses.replace(FALCON, num_query_groups=1, shared_norm=True),
    "falcon_40b": FALCON,
}  # fmt: skip


class Case(NamedTuple):
    architecture: str
    role: Role
    batch: str

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.architecture}-{self.role}-{self.batch}.npz"


CASES = [
    *(Case(name, "actor", "ragged") for name in ARCHITECTURES),
    *(Case(name, "actor", batch) for name in ("llama", "gpt2") for batch in ("packed", "plain")),
    *(Case(name, role, "ragged") for name in ("llama", "gpt2") for role in ("critic", "reward")),
    *(Case("llama", role, "packed") for role in ("critic", "reward")),
    Case("llama", "actor_critic", "ragged"),
]


# ------------------------------------------------------------------------------------------------- the fixed input


@dataclass(frozen=True, kw_only=True)
class Weighted(Sequences):
    weights: Tensor  # (B, R) float32: the loss's factor of each token


def batch(name: str) -> Weighted:
    """8 rows of 24 tokens. ragged: left-padded prompts of 1 to 10 tokens, responses of 1 to 14, padding; packed: one to
    four examples a row, padding, and a row of padding alone; plain: right-padded rows without segments. One row counts
    nowhere. The ids of the padding of ragged and packed rows lie outside the vocabulary."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    tokens = random.randint(0, VOCABULARY, (8, 24))
    segments = np.zeros((8, 24), np.int64)
    if name == "ragged":
        first = 10
        sizes = zip((1, 10, 3, 7, 5, 10, 2, 8), (14, 1, 6, 9, 14, 3, 11, 7), strict=True)
        for row, (prompt, response) in enumerate(sizes):
            segments[row, first - prompt : first + response] = 1
    else:
        first = 1
        packed = ([9, 11], [24], [3, 5, 16], [1, 23], [2, 1, 4, 10], [], [12, 12], [7])
        lengths = packed if name == "packed" else [[length] for length in (24, 3, 17, 2, 11, 24, 8, 20)]
        for row, sizes in enumerate(lengths):
            edges = np.cumsum([0, *sizes])
            for number, (start, end) in enumerate(itertools.pairwise(edges)):
                segments[row, start:end] = number + 1
    counted = (segments[:, first:] > 0) & (segments[:, first:] == segments[:, first - 1 : -1])
    chosen = random.random_sample(counted.shape) < 0.7
    chosen[1, 0] = True  # of the only response token of a ragged row
    mask = counted & chosen
    mask[3] = False
    weights = random.uniform(-1, 1, mask.shape).astype(np.float32)
    tokens[segments == 0] = 0 if name == "plain" else VOCABULARY + 3
    return Weighted(
        tokens=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        segments=None if name == "plain" else torch.from_numpy(segments),
        prompt_len=first,
        weights=torch.from_numpy(weights),
    )


def loss(outputs: dict[str, Tensor], rows: Weighted):
    """The sum over tokens that count of weight * (log-prob + value or score) + 0.1 * entropy, and their number."""
    total = sum(
        (0.1 if name == "entropy" else rows.weights) * value.masked_fill(~rows.mask, 0)
        for name, value in outputs.items()
    )
    return total.sum(), rows.mask.sum(), {}


def shapes(case: Case) -> dict[str, Shape]:
    """Every weight of the case's model, by its name in checkpoints."""
    architecture = ARCHITECTURES[case.architecture]
    found = architecture.shapes()
    if not case.role.startswith("actor"):
        found.pop("output_layer.weight", None)
    if case.role != "actor":
        found |= {"value_head.weight": (1, architecture.hidden_size), "value_head.bias": (1,)}
    return found


def weights(case: Case) -> dict[str, Tensor]:
    """The fixed weights, none of them zero or one: norms near their neutral value, matrices of deviation 0.2."""
    found = {}
    for name, shape in shapes(case).items():
        random = np.random.RandomState(zlib.crc32(f"{case.architecture} {name}".encode()))
        values = random.standard_normal(shape) * (0.2 if len(shape) == 2 else 0.1)
        if "norm" in name and name.endswith("weight") and not ARCHITECTURES[case.architecture].zero_centered_norm:
            values += 1
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


# ------------------------------------------------------------------------------------------------------- the arrays


def canonical(name: str) -> str:
    """A parameter's name in checkpoints, which fuse a norm with the linear layer behind it."""
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def digest(gradients: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """{name: vector} of gradients by name: a vector's own entries; of an (r, c) matrix c + r sums of the rows and of
    the columns, with fixed random signs, its norm and its largest entry. An entry that is wrong by d moves a sum of its
    row and one of its column by d."""
    found = {}
    for name, gradient in sorted(gradients.items()):
        values = gradient.double().numpy()
        if values.ndim == 2:
            random = np.random.RandomState(zlib.crc32(name.encode()))
            left, right = (random.choice([-1.0, 1.0], size) for size in values.shape)
            values = np.concatenate([left @ values, values @ right, [np.linalg.norm(values), np.abs(values).max()]])
        found[name] = values
    return found


def measure(work: list[tuple[dict, list[tuple[Case, int, str]]]]) -> list[tuple[int, dict]]:
    """[(ParallelConfig fields, [(case, rows of a micro-batch, recompute)])] -> [(data rank, arrays)] of all
    cases in turn.

    The arrays of a case by name: the head's outputs for this rank's rows, (B, R); `gradients`, the digest of the loss's
    gradients, if every rank holds whole ones; `grad_norm`, their norm.
    """
    found = []
    for sizes, jobs in work:
        with layout(**sizes) as topology:
            found += [(topology.data_rank, _arrays(topology, *job)) for job in jobs]
    return found


def _arrays(topology: Topology, case: Case, micro: int, recompute: str) -> dict:
    engine = build(
        case.role, ARCHITECTURES[case.architecture], topology, micro_batch_tokens=24 * micro, dtype="fp32",
        optimizer=OptimizerConfig(clip_grad=0.0), recompute=recompute,
    )  # fmt: skip
    set_full_weights(engine, weights(case), canonical)
    rows = share(batch(case.batch), topology)
    options = {"with_entropy": True} if case.role.startswith("actor") else {}
    arrays = {name: value.numpy() for name, value in engine.forward(rows, **options).items()}
    arrays["grad_norm"] = np.array([engine.step(rows, loss, **options)["grad_norm"].value])
    if topology.data_size == 1 or not topology.parallel.distributed_optimizer:  # otherwise a rank holds a shard
        gradients = full_weights(engine, lambda parameter: parameter.main_grad)
        arrays["gradients"] = digest({canonical(name): value for name, value in gradients.items()})
    return arrays


# -------------------------------------------------------------------------------------------------------- the files


def save(case: Case, arrays: dict) -> None:
    """Outputs that count, else 0. One array for all gradients, since every array of a file costs some hundred
    bytes."""
    mask = batch(case.batch).mask.numpy()
    flat = {name: value for name, value in arrays.items() if name != "gradients"}
    flat = {name: value if name == "grad_norm" else np.where(mask, value, 0) for name, value in flat.items()}
    gradients = np.concatenate([arrays["gradients"][name] for name in sorted(arrays["gradients"])])
    np.savez_compressed(case.path, gradients=gradients.astype(np.float32), **flat)


def load(case: Case) -> dict:
    """What `save` wrote; the gradients by name again."""
    with np.load(case.path) as file:
        arrays = dict(file)
    flat, gradients, start = arrays["gradients"], {}, 0
    for name, shape in sorted(shapes(case).items()):
        size = shape[0] if len(shape) == 1 else sum(shape) + 2
        gradients[name] = flat[start : start + size]
        start += size
    assert start == len(flat), (case, start, len(flat))
    return arrays | {"gradients": gradients}


def worst(case: Case, found: dict, expected: dict, rows: slice = slice(None)) -> tuple[float, str]:
    """(the largest difference of two sets of arrays, the array with it), as a part of the largest entry of each
    expected array. Outputs are compared where they count; log-probs and entropy must be 0 elsewhere. `rows`: those of
    `found`; `expected` has all."""
    everywhere = batch(case.batch).mask.numpy()
    mask = everywhere[rows]
    flat = found.keys() - {"gradients"}
    assert flat == expected.keys() - {"gradients"}, (case, flat)
    pairs = []
    for name in sorted(flat):
        got, want, scale = found[name], expected[name], np.abs(expected[name]).max()
        if name != "grad_norm":
            assert got.shape == mask.shape, (case, name, got.shape)
            assert name in ("values", "scores") or not got[~mask].any(), (case, name)
            got, want, scale = got[mask], want[rows][mask], np.abs(want[everywhere]).max()
        pairs.append((name, got, want, scale))
    if "gradients" in found:
        assert found["gradients"].keys() == expected["gradients"].keys(), case
        for name, want in expected["gradients"].items():
            pairs.append((name, found["gradients"][name], want, np.abs(want).max()))
    differences = [(float(np.abs(got - want).max() / scale), name) for name, got, want, scale in pairs]
    return max(differences, key=lambda pair: np.inf if np.isnan(pair[0]) else pair[0])
