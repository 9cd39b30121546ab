"""Adapters go to peft and back without a change, and merged to transformers; and a model runs as peft runs it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config import UserError
from megarlhf.convert import adapters, convert
from megarlhf.convert.__main__ import main
from megarlhf.models import lora
from megarlhf.models.adapters import Adapters, built
from megarlhf.models.locate import find_model
from megarlhf.models.spec import Architecture
from tests.convert.models import save
from tests.distributed.layouts import full_weights, layout, share
from tests.distributed.test_huggingface import Sequences, hf_logprobs, hf_model, prompts

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5, "use_rslora": False, "bias": "none",
          "lora_dropout": 0.0, "target_modules": [], "base_model_name_or_path": None}  # fmt: skip
LAYERS = 4
MODULES = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
           "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}  # fmt: skip


def others(directory, model, targets, **changes):
    """Adapters as another program wrote them: each projection has an A of its own. Returns the model with W + B A s."""
    generator = torch.Generator().manual_seed(3)
    tensors, weights = {}, dict(model.named_parameters())
    config = {**CONFIG, "target_modules": list(targets), **changes}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    merged = {name: value.detach().double() for name, value in weights.items()}
    for layer in range(LAYERS):
        for target in targets:
            module = f"model.layers.{layer}.{MODULES[target]}.{target}"
            rows, columns = weights[f"{module}.weight"].shape
            a = torch.randn(config["r"], columns, generator=generator) * 0.2
            b = torch.randn(rows, config["r"], generator=generator) * 0.2
            tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
            merged[f"{module}.weight"] += scale * (b.double() @ a.double())
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return merged


def logprobs(directory, tokens, valid, cases):
    results = []
    batch = Sequences(tokens=tokens, mask=valid[:, 1:] & valid[:, :-1], segments=valid.long())
    for sizes in cases:
        with layout(**sizes) as topology:
            engine = built("actor", find_model(directory), topology, micro_batch_tokens=64, dtype="fp32")
            apart = engine.forward(share(batch, topology))["logprobs"]
            with lora.off(engine.modules):
                assert not torch.allclose(engine.forward(share(batch, topology))["logprobs"], apart)
            results.append((topology.data_rank, apart, full_weights(engine)))
    return results


CASES = [
    ("llama", tuple(MODULES), {}),
    ("qwen2", ("q_proj", "v_proj"), {"use_rslora": True}),
    ("mistral", ("k_proj", "o_proj", "up_proj"), {"r": 2}),
]


@pytest.mark.parametrize(("family", "targets", "changes"), CASES, ids=[case[0] for case in CASES])
def test_there_and_back(ranks, tmp_path, capsys, family, targets, changes):
    model = hf_model(family)
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "base")
    merged = others(tmp_path / "peft", model, targets, **changes)
    command = ["peft2megatron", str(tmp_path / "peft"), str(tmp_path / "ours"), "--base", str(tmp_path / "base")]
    assert main(command) == 0, capsys.readouterr().err
    tokens, valid = prompts()
    counted = valid[:, 1:] & valid[:, :-1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(merged[name])
    expected = hf_logprobs(model, tokens, valid)
    cases = [dict(tensor=2, sequence=True), dict(pipeline=2)]
    for rank in ranks.run(2, logprobs, str(tmp_path / "ours"), tokens, valid, cases):
        for data_rank, found, _ in rank:
            assert data_rank == 0
            assert ((found - expected) * counted).abs().max() < 2e-5

    assert main(["megatron2peft", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0, capsys.readouterr().err
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    told = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    given = {**CONFIG, **changes}
    assert all(told[key] == given[key] for key in ("r", "lora_alpha", "use_rslora", "bias"))
    assert sorted(told["target_modules"]) == sorted(targets)

    convert.megatron2hf(tmp_path / "ours", tmp_path / "merged")
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter.double(), merged[name], rtol=0, atol=2e-6, msg=name)


def test_peft_runs_what_we_export(ranks, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    from peft import PeftModel

    model = hf_model("llama")
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "base")
    others(tmp_path / "theirs", model, tuple(MODULES), use_rslora=True)
    adapters.peft2megatron(tmp_path / "theirs", tmp_path / "ours", tmp_path / "base")
    adapters.megatron2peft(tmp_path / "ours", tmp_path / "exported")
    tokens, valid = prompts()
    ((answer,),) = ranks.run(1, logprobs, str(tmp_path / "ours"), tokens, valid, [{}])
    loaded = PeftModel.from_pretrained(model, tmp_path / "exported").eval()
    expected = hf_logprobs(loaded, tokens, valid)
    assert ((answer[1] - expected) * (valid[:, 1:] & valid[:, :-1])).abs().max() < 1e-5
    loaded.save_pretrained(tmp_path / "saved")  # with all keys that peft writes
    adapters.peft2megatron(tmp_path / "saved", tmp_path / "again", tmp_path / "base")
    first, second = (Adapters.of(tmp_path / name / "actor") for name in ("ours", "again"))
    assert first.lora.same_shape(second.lora, Architecture.load(tmp_path / "again" / "actor"))


REFUSED = [
    ("use_dora", True, "use_dora: True has no counterpart"),
    ("alpha_pattern", {"q_proj": 3}, "alpha_pattern"),
    ("modules_to_save", ["lm_head"], "modules_to_save"),
    ("peft_type", "IA3", "peft_type: IA3"),
    ("r", 4, "B of layer 0's q_proj is not"),
]


def test_refused(tmp_path):
    model = hf_model("llama")
    model.save_pretrained(tmp_path / "hf")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "base")
    others(tmp_path / "peft", model, ("q_proj", "v_proj"))
    path = tmp_path / "peft" / "adapter_config.json"
    good = json.loads(path.read_text())
    for key, value, message in REFUSED:
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(UserError, match=message):
            adapters.peft2megatron(tmp_path / "peft", tmp_path / "ours", tmp_path / "base")
    path.write_text(json.dumps(good))
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    missing = {name: tensor for name, tensor in tensors.items() if "layers.2.self_attn.v_proj" not in name}
    save_file(missing, tmp_path / "peft" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="layer 2 has no adapter on v_proj"):
        adapters.peft2megatron(tmp_path / "peft", tmp_path / "ours", tmp_path / "base")
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)},
              tmp_path / "peft" / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(UserError, match="lm_head.lora_A.weight' has no place"):
        adapters.peft2megatron(tmp_path / "peft", tmp_path / "ours", tmp_path / "base")
    with pytest.raises(UserError, match="holds no adapters"):
        adapters.megatron2peft(tmp_path / "base", tmp_path / "back")
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors")
    adapters.peft2megatron(tmp_path / "peft", tmp_path / "ours", tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="is not there"):
        convert.megatron2hf(tmp_path / "ours", tmp_path / "merged")
    convert.hf2megatron(tmp_path / "hf", tmp_path / "base", convert.Options(dtype="bf16"))
    with pytest.raises(UserError, match="has other weights than"):
        convert.megatron2hf(tmp_path / "ours", tmp_path / "merged")


@pytest.mark.parametrize(
    ("family", "message"), [("mixtral", "have no adapters here"), ("glm4", "keeps gate_proj and up_proj in another")]
)
def test_families_without_a_layer_for_each_projection_are_refused(tmp_path, family, message):
    convert.hf2megatron(save(family, tmp_path / "hf"), tmp_path / "base")
    others(tmp_path / "peft", hf_model("llama"), ("q_proj", "v_proj"))
    with pytest.raises(UserError, match=message):
        adapters.peft2megatron(tmp_path / "peft", tmp_path / "ours", tmp_path / "base")
