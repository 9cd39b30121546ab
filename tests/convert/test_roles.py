"""Reward models and critics: from NeMo-Aligner and transformers to ours and back to transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from megarlhf.convert import convert, registry, torch_dist
from megarlhf.convert.logits import their_scores
from megarlhf.convert.workers import Workers
from megarlhf.models.spec import Architecture
from tests.convert.models import CASES, assert_same_tensors, save, tensors
from tests.convert.test_faults import refused
from tests.convert.test_sources import archives, legacy, rewrite  # noqa: F401 (fixtures)

TOKENS = torch.arange(24).view(2, 12)


def save_reward_model(case, directory):
    """A random classifier with one label; transformers has no initial weights that would hide mistakes."""
    save(case, directory)  # for its tokenizer
    kind, fields = CASES[case]
    torch.manual_seed(3)
    config = kind(**fields, num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(directory)
    return directory


def our_scores(ours):
    from megarlhf import checkpoint
    from megarlhf.batch import Sequences
    from megarlhf.models.build import build
    from megarlhf.models.locate import find_model
    from tests.distributed.layouts import layout

    with layout() as topology:
        model = find_model(ours, "reward")
        architecture = Architecture.load(model)
        results = []
        for role, key in (("reward", "scores"), ("critic", "values")):
            engine = build(role, architecture, topology, micro_batch_tokens=48, dtype="fp32")
            checkpoint.load(engine, model, weights_only=True)
            everything = torch.ones_like(TOKENS[:, 1:], dtype=torch.bool)
            results.append(engine.forward(Sequences(tokens=TOKENS, mask=everything))[key])
        return results


@pytest.mark.parametrize("case", ["llama", "llama-3.1-tied", "gpt2", "gemma2", "gemma3", "olmo2"])
def test_reward_model_of_transformers(case, ranks, tmp_path):
    source = save_reward_model(case, tmp_path / "source")
    convert.hf2megatron(source, tmp_path / "ours")
    assert not (tmp_path / "ours" / "actor").exists()
    scores, values = ranks.run(1, our_scores, tmp_path / "ours")[0]
    expected = their_scores(source, TOKENS)
    torch.testing.assert_close(scores, expected.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(values[:, 1:], scores[:, :-1], atol=1e-6, rtol=0)  # a critic from the reward model
    convert.megatron2hf(tmp_path / "ours", tmp_path / "back", convert.Options(role="reward"))
    assert_same_tensors(tensors(source), tensors(tmp_path / "back"))
    torch.testing.assert_close(their_scores(tmp_path / "back", TOKENS), expected, atol=1e-6, rtol=0)


def change_constants(model, **values):
    """The model as training leaves it: written anew with other constants in its head."""
    reader = torch_dist.Reader(model, None)
    data = {name: reader.read(name) for name in reader.specs}
    data |= {f"value_head.{name}": torch.tensor([value]) for name, value in values.items()}
    for file in [*model.glob("*.distcp"), model.parent / "checksums.json"]:  # of what was there before
        file.unlink()

    class Changed:
        specs, read = reader.specs, staticmethod(data.__getitem__)

    steps = [registry.Step((name,), (name,), lambda tensors: tensors) for name in data]
    convert.transfer(Changed, torch_dist.Writer(model, reader.specs), reader.specs, steps, "test", Workers())


def test_gain_and_bias_of_a_trained_reward_model(ranks, tmp_path, capsys):
    """The gain goes into the weight, the constant into config.json, which says it and the way back reads it."""
    convert.hf2megatron(save_reward_model("llama", tmp_path / "source"), tmp_path / "ours")
    change_constants(tmp_path / "ours" / "reward", bias=0.25, reward_gain=3.0, reward_bias=-2.0)
    summary = convert.megatron2hf(tmp_path / "ours" / "reward", tmp_path / "back")
    assert "score_offset = -1.25" in str(summary)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["score_offset"] == -1.25
    weight = tensors(tmp_path / "source")["score.weight"]
    assert torch.equal(tensors(tmp_path / "back")["score.weight"], 3 * weight)
    config = AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.num_labels, config.architectures) == (1, ["LlamaForSequenceClassification"])
    scores, _ = ranks.run(1, our_scores, tmp_path / "ours")[0]
    torch.testing.assert_close(their_scores(tmp_path / "back", TOKENS).float(), scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        scores, (3 * their_scores(tmp_path / "source", TOKENS) - 1.25).float(), atol=1e-4, rtol=0
    )
    convert.hf2megatron(tmp_path / "back", tmp_path / "again")
    again, _ = ranks.run(1, our_scores, tmp_path / "again")[0]
    torch.testing.assert_close(again, scores, atol=1e-4, rtol=0)


@pytest.mark.shared
def test_reward_model_of_nemo(archives, legacy, ranks, tmp_path):  # noqa: F811
    """rm_head on the last stage, cut on dim 1 over the tensor ranks; the output layer is still in the file."""
    head = {"weight": torch.linspace(-1, 1, 64)[None], "bias": torch.tensor([0.5])}
    cut = shutil.copytree(archives / "tiny_llama_mha_legacy_tp2pp2", tmp_path / "cut")
    for rank in (0, 1):
        shard = {"model.rm_head.weight": head["weight"].chunk(2, 1)[rank].clone(), "model.rm_head.bias": head["bias"]}
        rewrite(cut / f"tp_rank_0{rank}_pp_rank_001" / "model_weights.ckpt", lambda w, shard=shard: {**w, **shard})
    rewrite(
        legacy / "model_weights.ckpt",
        lambda w: {**w, **{f"model.rm_head.{name}": value for name, value in head.items()}},
    )
    answers = []
    for name, source in (("one", legacy), ("four", cut)):
        convert.COMMANDS["nemo2megatron"](source, tmp_path / name)
        certificate = json.loads((tmp_path / name / "certificate.json").read_text())
        assert "output_layer.weight" in certificate["source"]["ignored"]
        answers.append(ranks.run(1, our_scores, tmp_path / name)[0][0])
    assert torch.equal(*answers)
    convert.megatron2hf(tmp_path / "one", tmp_path / "back", convert.Options(role="reward"))
    assert torch.equal(tensors(tmp_path / "back")["score.weight"], head["weight"])
    torch.testing.assert_close(their_scores(tmp_path / "back", TOKENS).float(), answers[0], atol=1e-4, rtol=0)


def test_not_a_reward_model(tmp_path, capsys):
    source = save_reward_model("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    capsys.readouterr()
    refused(capsys, "hf2megatron", source, tmp_path / "target", "2 labels")
    (source / "config.json").write_text(json.dumps(config))
    weights = tensors(source)
    save_file({name: value for name, value in weights.items() if name != "score.weight"}, source / "model.safetensors")
    refused(capsys, "hf2megatron", source, tmp_path / "target", "'score.weight' [1, 32]", "missing")
