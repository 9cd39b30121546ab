"""A NeMo SFT checkpoint goes into `megarlhf ppo`, and what comes out goes to transformers, either head of it."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from megarlhf.convert import convert, exports
from megarlhf.convert.__main__ import main
from megarlhf.convert.logits import their_logprobs, their_scores
from megarlhf.models.spec import Architecture
from tests.convert.test_faults import refused
from tests.e2e.test_ppo import run_ppo

TOKENS = torch.arange(24).view(2, 12)


def our_outputs(directory):
    """(log-probs, values) of the actor in `directory` that carries both heads."""
    from megarlhf import checkpoint
    from megarlhf.batch import Sequences
    from megarlhf.models.build import build
    from tests.distributed.layouts import layout

    with layout() as topology:
        engine = build("actor_critic", Architecture.load(directory), topology, micro_batch_tokens=48, dtype="fp32")
        checkpoint.load(engine, directory, weights_only=True)
        outputs = engine.forward(Sequences(tokens=TOKENS, mask=torch.ones_like(TOKENS[:, 1:], dtype=torch.bool)))
        return outputs["logprobs"], outputs["values"]


@pytest.mark.shared
def test_nemo_to_ppo_to_transformers(shared, ranks, tmp_path, capsys):
    assert main(["nemo2megatron", str(shared / "fixtures/nemo1/tiny_llama_mha_legacy_tp2pp2.nemo"),
                 str(tmp_path / "base")]) == 0  # fmt: skip
    prompts = [json.dumps({"prompt": f"{i} and {i + 1}"}) for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "judge.py").write_text(
        "def score(prompts, responses):\n    return [len(set(text)) for text in responses]\n"
    )
    settings = {
        "run": str(tmp_path / "run"),
        "model": {"checkpoint": str(tmp_path / "base"), "dtype": "fp32"},  # its tokenizer came along
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "length": 16},
        "sampler": {"response_length": 8},
        "scoring": {"sources": [{"function": f"{tmp_path}/judge.py:score"}]},
        "critic": {"kind": "shared"},
        "training": {"steps": 2, "batch_size": 8, "minibatches": 1, "micro_batch_tokens": 96},
        "optimizer": {"lr": 1e-3},
        "parallel": {"tensor": 2},
    }
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    ranks.run(2, run_ppo, tmp_path / "ppo.yaml", [[]])
    actor = exports.find_exported(tmp_path / "run", None)[0]
    assert actor.parent.name == "step_00000002"
    logprobs, values = ranks.run(1, our_outputs, actor)[0]

    capsys.readouterr()
    assert main(["megatron2hf", str(tmp_path / "run"), str(tmp_path / "policy")]) == 0
    said = capsys.readouterr().out
    assert "left out: value_head.weight, " in said and "--role critic" in said
    torch.testing.assert_close(logprobs.double(), their_logprobs(tmp_path / "policy", TOKENS), atol=1e-4, rtol=0)
    base = convert.megatron2hf(tmp_path / "base", tmp_path / "untrained").target
    assert (their_logprobs(base, TOKENS) - logprobs).abs().max() > 1e-3  # it has learned something

    assert main(["megatron2hf", str(tmp_path / "run"), str(tmp_path / "critic"), "--role", "critic"]) == 0
    said = capsys.readouterr().out
    assert "left out: output_layer.weight; export that head with --role actor" in said
    scores = their_scores(tmp_path / "critic", TOKENS).float()
    torch.testing.assert_close(values[:, 1:], scores[:, :-1], atol=1e-4, rtol=0)
    assert main(["verify", str(tmp_path / "run"), str(tmp_path / "critic")]) == 0
    capsys.readouterr()
    refused(capsys, "megatron2hf", tmp_path / "base", tmp_path / "none", "holds no critic", role="critic")
