"""The stage dataclasses: the data between the parts of a step. Frozen; no part changes its input.

Legend: B rows, S tokens a row, P prompt columns, R = S - P response columns, V vocabulary.
Per-token tensors are response-aligned: column j of a (B, R) tensor belongs to token P + j.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Base of the stages: every tensor field has the rows first. Non-tensor fields hold for all rows."""

    def map(self, function):
        """The same stage with `function` of each of its tensors."""
        tensors = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def select(self, index):
        """The rows `index` (a slice or an index tensor)."""
        return self.map(lambda value: value[index])

    def to(self, device: torch.device):
        return self.map(lambda value: value.to(device, non_blocking=True))

    def __len__(self) -> int:
        return next(len(v) for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor))


Stage = TypeVar("Stage", bound=Rows)


def concatenated(parts: Sequence[Stage]) -> Stage:
    """The rows of several parts of one stage, in their order."""
    names = [field.name for field in dataclasses.fields(parts[0]) if isinstance(getattr(parts[0], field.name), Tensor)]
    return dataclasses.replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class Sequences(Rows):
    """Rows of tokens, and the mask of a model's outputs for them. A model reads the real tokens alone, as a stream
    (stream.py).

    `segments` says which tokens see each other: 0 is padding, k > 0 the k-th example packed into the row. Left padding,
    right padding and packing are all just segments; positions restart in each (detail G3). None: every token is real,
    and a row is one example.
    """

    tokens: Tensor  # (B, S) int64
    mask: Tensor  # (B, R) bool: the tokens that count
    segments: Tensor | None = None  # (B, S) int64
    prompt_len: int = 1  # P: outputs are for tokens[:, P:]
    together: int = 1  # so many adjacent rows are always in one micro-batch
    # (B, R, H): the last hidden states of a reference, to be compared with it; it predicts the counted tokens from them
    ref_states: Tensor | None = None
    # (B, S, L, k) int16: the experts that computed each token in each layer of the sampler's model; -1: none recorded
    experts: Tensor | None = None

    def __post_init__(self):
        rows, length = self.tokens.shape
        assert self.mask.shape == (rows, length - self.prompt_len), (self.mask.shape, self.tokens.shape)
        assert self.segments is None or self.segments.shape == self.tokens.shape
        assert rows % self.together == 0, (rows, self.together)

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """What a model reads beside the tokens."""
        return {} if self.ref_states is None else {"ref_states": self.ref_states}

    def on_host(self) -> Sequences:
        """The tokens and what is needed to cut them into streams, on the CPU."""
        segments = None if self.segments is None else self.segments.cpu()
        experts = None if self.experts is None else self.experts.cpu()
        return Sequences(
            self.tokens.cpu(), self.mask.cpu(), segments, self.prompt_len, self.together, experts=experts
        )  # fmt: skip

    def emptied(self):
        """The first rows with one token each, of which none counts: they fill up micro-batches."""
        rows = self.select(slice(0, self.together))
        segments = torch.zeros_like(rows.tokens)
        segments[:, 0] = 1
        tokens = torch.zeros_like(rows.tokens)  # theirs may be padding, outside the vocabulary
        return dataclasses.replace(rows, tokens=tokens, mask=torch.zeros_like(rows.mask), segments=segments)


@dataclass(frozen=True)
class Scores(Rows):
    """The scores of responses: one for the outcome, and one for each token if steps are scored. Weights, clips and
    normalisation of the K sources are applied, except in `by_source`."""

    scores: Tensor  # (B,) float32: of the whole response, or the penalty
    mask: Tensor  # (B, R) bool: the tokens that were scored, all that count unless truncated (detail P5)
    accepted: Tensor  # (B,) bool: has a score, not the penalty
    token_scores: Tensor | None = None  # (B, R) float32, 0 outside `mask` and with the penalty; default: 0
    by_source: Tensor | None = None  # (B, K) float32: each source's score, summed over tokens; default: `scores`
    weights: tuple[float, ...] = (1.0,)  # of the K sources

    def __post_init__(self):
        if self.token_scores is None:
            object.__setattr__(self, "token_scores", torch.zeros_like(self.mask, dtype=torch.float32))
        if self.by_source is None:
            object.__setattr__(self, "by_source", self.scores[:, None])

    @property
    def total(self) -> Tensor:
        """(B,) float32: the outcome's score and those of the tokens."""
        return self.scores + self.token_scores.sum(1)


@dataclass(frozen=True)
class Signals(Rows):
    """The models' outputs for the sampled tokens, before any update. The last two only if an algorithm needs them."""

    logprobs: Tensor  # (B, R) float32, of the policy that sampled them
    ref_logprobs: Tensor  # (B, R) float32
    values: Tensor | None = None  # (B, R) float32: column j is of the state before token P + j
    kl: Tensor | None = None  # (B, R) float32: the exact KL of each token's distribution


@dataclass(frozen=True, kw_only=True)
class Experience(Sequences):
    """The training data of a policy."""

    logprobs: Tensor  # (B, R) float32, as in Signals
    advantages: Tensor  # (B, R) float32, 0 outside the mask
    weights: Tensor | None = None  # (B, R) float32: importance weights of the tokens (algorithms/policy_loss.py)
    ref_logprobs: Tensor | None = None  # (B, R) float32, as in Signals; for a KL penalty in the loss
    kl_coef: float = 0.0  # of that penalty


@dataclass(frozen=True, kw_only=True)
class CriticExperience(Experience):
    """The training data of a policy and a critic. `advantages` are GAE of the rewards plus `correction`."""

    values: Tensor  # (B, R) float32, as in Signals
    rewards: Tensor  # (B, R) float32; this and the next two are 0 outside the mask
    returns: Tensor  # (B, R) float32
    correction: Tensor  # (B, R) float32 (algorithms/kl.py)


@dataclass(frozen=True, kw_only=True)
class Comparisons(Sequences):
    """Responses to one prompt in adjacent rows, K of them, the best first. `mask` is True at one token a row, where its
    score is read, or at all tokens of the response; nowhere in rows that pad a batch."""

    ranks: Tensor  # (B,) int64: 0 is the best; equal ranks are ties
    margins: Tensor  # (B,) float32: the least difference that a pair's scores should have
    nll_scale: float = 1.0  # pairs / counted tokens of the best responses, of the global minibatch or the held-out set
    # (B,) float64: the reference's log-prob of each response, where a loss needs it (algorithms/preference.py)
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Rewarded(Sequences):
    """Responses with rewards. The counted tokens of a row are adjacent, and the last one ends the response."""

    rewards: Tensor  # (B, R) float32: of each token, 0 outside the mask


@dataclass(frozen=True, kw_only=True)
class LabelledSteps(Sequences):
    """Solutions with labels of their steps. `mask` is True at the ends of labelled steps; nowhere in rows that pad a
    batch."""

    labels: Tensor  # (B, R) float32: the probability that the step is right, 0 outside the mask
    # (B,) bool: the first wrong step is known, or that there is none: all steps before it are labelled, and not cut
    decided: Tensor


@dataclass(frozen=True, kw_only=True)
class Ratings(Sequences):
    """Single responses marked good or bad. `mask` is True at the tokens of the response; nowhere in rows that pad a
    batch.

    Each row's prompt stands also before the response of another row of the global minibatch (S' columns, R' = S' - 1).
    """

    labels: Tensor  # (B,) bool: good
    mismatched_tokens: Tensor  # (B, S') int64
    mismatched_mask: Tensor  # (B, R') bool: of the other row's response; nowhere where there is no other row
    mismatched_segments: Tensor  # (B, S') int64
    # what the loss adds before the split into micro-batches (algorithms/kto.py)
    ref_logprobs: Tensor | None = None  # (B,) float64: the reference's log-prob of each response
    baseline: float = 0.0  # z0, of the global minibatch

    @property
    def mismatched(self) -> Sequences:
        """The prompts with the other rows' responses."""
        return Sequences(self.mismatched_tokens, self.mismatched_mask, self.mismatched_segments)


@dataclass(frozen=True)
class Prompts(Rows):
    """Queries of static length P: padded at the left, with an id outside the vocabulary that no model reads (detail
    G2)."""

    tokens: Tensor  # (B, P) int64
    valid: Tensor  # (B, P) bool: not padding; at least the last column
    sequence_ids: Tensor  # (B,) int64: a prompt's index in the whole run, the same in every layout
    prompt_ids: Tensor  # (B,) int64: its row in the data set, by which its record is looked up on the host

    def __post_init__(self):
        assert self.tokens.shape == self.valid.shape
        assert self.sequence_ids.shape == self.prompt_ids.shape == self.tokens.shape[:1]


@dataclass(frozen=True, kw_only=True)
class Rollout(Sequences):
    """Prompts with their sampled responses; `Engine.forward` reads it as sequences. With n samples a prompt, the n rows
    of a prompt are adjacent, and sample j of the prompt with id s has the sequence id s n + j.

    All R response tokens count, also past EOS (detail G4); with `stop_at_eos` those up to the first EOS, and what
    follows is padding, with log-prob and entropy 0.
    """

    sequence_ids: Tensor  # (B,) int64
    prompt_ids: Tensor  # (B,) int64, as in Prompts
    group_ids: Tensor  # (B,) int64: equal for the samples of one prompt of one step, and for no others of the run
    logprobs: Tensor  # (B, R) float32, of softmax(logits / temperature)
    entropy: Tensor | None = None  # (B, R) float32, of the same distribution


@dataclass(frozen=True)
class Batch:
    """The responses of one step, with their scores and signals."""

    rollout: Rollout
    scores: Scores
    signals: Signals
    extra: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # further tensors of one algorithm, B rows
