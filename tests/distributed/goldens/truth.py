"""The arrays of a golden case by transformers, in float64: every example alone, without padding and without a mask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarlhf.convert import registry
from megarlhf.models.spec import Architecture
from tests.distributed.goldens.cases import ARCHITECTURES, Case, batch, digest, loss, weights


def examples(rows) -> list[tuple[int, slice]]:
    """(row, columns) of every example. Without segments the padding at the right of a row belongs to its example."""
    if rows.segments is None:
        return [(row, slice(0, rows.tokens.shape[1])) for row in range(len(rows))]
    found = []
    for row, segments in enumerate(rows.segments.tolist()):
        for number in sorted({*segments} - {0}):
            start = segments.index(number)
            found.append((row, slice(start, start + segments.count(number))))
    return found


def hf_model(architecture: Architecture, own: dict[str, Tensor]):
    """(transformers' model in float64 with the weights `own`, its parameters by their names in files)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = registry.write_config(architecture, architecture.family)
    # A padding id would have no gradient, and GPT-2's default ids lie outside the vocabulary.
    special = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **special)).double().eval()
    parameters = dict(model.named_parameters())
    if not architecture.tie_embeddings:  # releases differ in the name that a loaded model has for it
        (head,) = (name for name, value in parameters.items() if value is model.get_output_embeddings().weight)
        parameters[registry.FAMILIES[architecture.family].head] = parameters.pop(head)
    for step in registry.steps_to_theirs(architecture):
        for name, value in zip(step.outputs, step.convert([own[name] for name in step.inputs]), strict=True):
            parameters[name].data.copy_(value)
    return model, parameters


def arrays(case: Case) -> dict:
    """The arrays of `cases.measure` for all rows."""
    own = {name: value.double() for name, value in weights(case).items()}
    own.setdefault("output_layer.weight", own["embedding.word_embeddings.weight"])  # a scalar model has none
    model, parameters = hf_model(ARCHITECTURES[case.architecture], own)
    head = [own[name].clone().requires_grad_() for name in ("value_head.weight", "value_head.bias") if name in own]
    rows = batch(case.batch)
    names = {"actor": ("logprobs", "entropy"), "critic": ("values",), "reward": ("scores",)}
    names["actor_critic"] = names["actor"] + names["critic"]
    whole = {name: [torch.zeros(24, dtype=torch.float64)] * len(rows) for name in names[case.role]}
    for row, columns in examples(rows):
        tokens = rows.tokens[row, columns]
        hidden = model.base_model(tokens[None]).last_hidden_state[0]
        log_p = model.get_output_embeddings()(hidden).log_softmax(-1)[:-1]
        found = {"logprobs": log_p.gather(1, tokens[1:, None]).squeeze(1), "entropy": -(log_p.exp() * log_p).sum(-1)}
        if head:
            scores = hidden @ head[0][0] + head[1]
            found |= {"values": scores[:-1], "scores": scores}
        for name in whole:
            value = found[name]
            after = 24 - columns.stop
            padded = torch.nn.functional.pad(value, (24 - after - len(value), after))
            whole[name][row] = whole[name][row] + padded
    outputs = {name: torch.stack(parts)[:, rows.prompt_len :] for name, parts in whole.items()}
    total, count, _ = loss(outputs, rows)
    (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    ours = {}
    for step in registry.steps_to_ours(ARCHITECTURES[case.architecture]):
        if all(name in gradients for name in step.inputs):
            ours |= dict(zip(step.outputs, step.convert([gradients[name] for name in step.inputs]), strict=True))
    if head:
        ours |= {"value_head.weight": head[0].grad, "value_head.bias": head[1].grad}
    norm = sum(value.square().sum() for value in ours.values()).sqrt()
    found = {name: value.detach().where(rows.mask, 0).numpy() for name, value in outputs.items()}
    return found | {"gradients": digest(ours), "grad_norm": np.array([norm.item()])}
