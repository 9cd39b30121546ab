"""A bandit whose best policy is known (tests/unit/test_bandit.py), with a transformer: through Engine.step, and through
`megarlhf ppo` as a user runs it."""

import json
import sys

import pytest
import torch
import yaml

from megarlhf import checkpoint
from megarlhf.algorithms.interface import share_trunk
from megarlhf.algorithms.kl import KLConfig
from megarlhf.algorithms.ppo import PPOConfig, algorithm, make_experience, whiten_minibatch
from megarlhf.batch import Rollout, Scores, Sequences
from megarlhf.experience import rollout as rollouts
from megarlhf.models.build import build
from megarlhf.models.locate import find_model
from megarlhf.models.spec import Architecture
from megarlhf.optim import OptimizerConfig
from tests.distributed.layouts import layout
from tests.e2e.bandit_judge import SCORES, WORDS
from tests.e2e.runs import CLI, finish
from tests.ranks import ROOT
from tests.scoring import row_ids
from tests.unit.test_bandit import distance, optimum

MODEL = dict(
    family="llama", num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2,
    vocab_size=len(WORDS), max_position_embeddings=8, init_std=0.3,
)  # fmt: skip
BETA, ROWS, UPDATES, SEED = 0.5, 128, 60, 3
# One update a batch and no whitening: see tests/unit/test_bandit.py.
PPO = dict(lam=1.0, whiten_advantages=False, clip_range_value=1e9, vf_coef=1.0)
ADAM = dict(name="adam", lr=0.02, schedule="linear", betas=(0.9, 0.95), clip_grad=0.0)
PROMPT = [0, 1]


def sequences(tokens):
    """The prompt with these responses of one token."""
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens[:, None]], 1)
    mask = torch.ones(len(tokens), 1, dtype=torch.bool)
    return Sequences(tokens=tokens, mask=mask, segments=torch.ones_like(tokens), prompt_len=len(PROMPT))


def policy_of(engine):
    """The probabilities of all responses, (V,) float64."""
    return engine.forward(sequences(torch.arange(len(WORDS))))["logprobs"][:, 0].double().exp()


def best_of(reference):
    return optimum(policy_of(reference), torch.tensor(SCORES, dtype=torch.float64), BETA)


def learned(estimator, sizes):
    """The total variation between the optimum and what Engine.step makes of the reference, before and after."""
    config = PPOConfig(kl=KLConfig(estimator=estimator), **PPO)
    with layout(**sizes) as topology:
        options = dict(micro_batch_tokens=3 * ROWS // topology.data_size, dtype="fp32", seed=SEED, total_steps=UPDATES)
        reference = build("reference", Architecture(**MODEL), topology, **options)
        actor = build("actor_critic", Architecture(**MODEL), topology, optimizer=OptimizerConfig(**ADAM), **options)
        best, generator = best_of(reference), torch.Generator().manual_seed(0)
        before = distance(policy_of(actor), best)
        for _ in range(UPDATES):
            policy = policy_of(actor)
            sampled = torch.multinomial(policy, ROWS, replacement=True, generator=generator)
            mine = sampled.view(topology.data_size, -1)[topology.data_rank]
            rows = sequences(mine)
            rollout = Rollout(**vars(rows), **row_ids(len(rows)), logprobs=policy[mine].log()[:, None])
            signals = rollouts.evaluate(
                rollout,
                actor=actor,
                reference=reference,
                critic=None,
                temperature=1.0,
                signals=algorithm(config).signals,
            )
            scores = Scores(torch.tensor(SCORES)[mine], rows.mask, rows.mask[:, 0])
            experience = make_experience(rollout, scores, signals, kl_coef=BETA, config=config)
            experience = whiten_minibatch(experience, config=config, group=topology.data_group)
            actor.step(experience, share_trunk(algorithm(config)).updates(0)["actor"].loss)
        return before, distance(policy_of(actor), best)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_engine_steps_reach_the_optimum(ranks, estimator):
    for world_size, sizes in ((1, {}), (4, dict(tensor=2))):
        for before, after in ranks.run(world_size, learned, estimator, sizes):
            assert after < 0.02 < 0.3 < before, (world_size, before, after)


def distance_of(run):
    """That of the policy that a run has saved."""
    with layout() as topology:
        options = dict(micro_batch_tokens=3 * len(WORDS), dtype="fp32", seed=SEED)
        reference, actor = (build(role, Architecture(**MODEL), topology, **options) for role in ("reference", "actor"))
        checkpoint.load(actor, find_model(str(run)), weights_only=True)
        return distance(policy_of(actor), best_of(reference))


def write_tokenizer(directory):
    """Words, each a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*WORDS[:-1], "</s>"]
    tokenizer = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_program_reaches_the_optimum(ranks, tmp_path, estimator):
    write_tokenizer(tmp_path / "words")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a b"}) + "\n")
    settings = {
        "run": str(tmp_path / "run"), "seed": SEED, "tokenizer": str(tmp_path / "words"),
        "model": {"architecture": MODEL, "dtype": "fp32"},
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "length": 2},
        "sampler": {"response_length": 1, "micro_batch_size": ROWS},
        "scoring": {"sources": [{"function": f"{ROOT}/tests/e2e/bandit_judge.py:score"}]},
        "ppo": {**PPO, "kl": {"coef": BETA, "estimator": estimator}},
        "critic": {"kind": "shared"},
        "training": {"steps": UPDATES, "batch_size": ROWS, "epochs": 1, "micro_batch_tokens": 3 * ROWS},
        "optimizer": {**ADAM, "betas": list(ADAM["betas"])},
    }  # fmt: skip
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    done = finish(sys.executable, *CLI, "ppo", "--config", str(tmp_path / "ppo.yaml"))
    assert done.returncode == 0, done.stderr
    (found,) = ranks.run(1, distance_of, tmp_path / "run")
    assert found < 0.02
