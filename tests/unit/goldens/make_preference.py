"""`python tests/unit/goldens/make_preference.py`: the golden arrays of tests/unit/test_preference_oracles.py, computed
by TRL's own code. No test runs this script. Its environment, with Python 3.11:

    pip install torch==2.13.0 trl==1.12.0 transformers==5.23.0 requests

A policy and a reference, two Llamas with random weights in float64, read rows made by hand: 5 prompts, each with a
chosen and a rejected response, of different lengths, padded at the right. Inputs (B = 10 rows, 2i chosen, 2i + 1
rejected, R columns):
    mask, kl_mask (B, R)    the tokens of the responses; kl: each prompt with the response of the row `partner`
    policy, reference, kl_policy, kl_reference (B, R)    their log-probs, 0 outside the mask
    labels (B,), partner (B,)    of KTO: good; a permutation

Names of the other arrays are TRAINER/OPTIONS/WHAT; WHAT is `loss` or `grad`, its gradient by `policy`. It is read off
TRL's gradient by the logits, g (onehot - softmax), at the token itself. TRL 1.12.0, called on objects made without
__init__:
    DPOTrainer._compute_loss      every loss type that megarlhf has, and `sft` beside `sigmoid`
    KTOTrainer._compute_loss      with the z0 of these pairs
    CPOTrainer.cpo_loss (experimental)              `sigmoid` on sums, `simpo` on means
    ORPOTrainer.odds_ratio_loss (experimental)      on means; in float32
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

HERE = Path(__file__).parent
VOCAB, PROMPTS = 50, (2, 4, 3, 5, 1)
RESPONSES = ((3, 6), (1, 4), (7, 2), (4, 4), (5, 8))  # tokens of the chosen and of the rejected response
PARTNER = [2, 5, 8, 6, 9, 0, 4, 1, 3, 7]
LABELS = [True, False, True, True, False, False, True, False, True, False]
# our name, our options -> TRL's loss types, their weights, other fields
DPO = {
    "sigmoid,beta=0.1": dict(loss_types=["sigmoid"]),
    "sigmoid,beta=0.7": dict(loss_types=["sigmoid"], beta=0.7),
    "sigmoid_norm,beta=0.7": dict(loss_types=["sigmoid_norm"], beta=0.7),
    "hinge,beta=0.3": dict(loss_types=["hinge"], beta=0.3),
    "ipo,beta=0.3": dict(loss_types=["ipo"], beta=0.3),
    "robust,beta=0.3,label_smoothing=0.1": dict(loss_types=["robust"], beta=0.3, label_smoothing=0.1),
    "sppo_hard,beta=0.3": dict(loss_types=["sppo_hard"], beta=0.3),
    "apo_zero,beta=0.3": dict(loss_types=["apo_zero"], beta=0.3),
    "apo_down,beta=0.3": dict(loss_types=["apo_down"], beta=0.3),
    "sigmoid+0.4sft,beta=0.3": dict(loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.4], beta=0.3),
}
KTO = {
    "kto,beta=0.1": dict(loss_type="kto"),
    "kto,beta=0.7,weights=1.33,0.8": dict(loss_type="kto", beta=0.7, desirable_weight=1.33, undesirable_weight=0.8),
    "apo_zero_unpaired,beta=0.3": dict(loss_type="apo_zero_unpaired", beta=0.3),
}


class Model(LlamaForCausalLM):
    """Keeps its last logits, for their gradient."""

    def forward(self, *arguments, **options):
        out = super().forward(*arguments, **options)
        if out.logits.requires_grad:
            out.logits.retain_grad()
            self.kept = out.logits
        return out


def llama(seed: int) -> Model:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    return Model(config)


def padded(rows):
    """(input_ids, attention_mask, completion_mask) of [(prompt, response)]."""
    length = max(len(prompt) + len(response) for prompt, response in rows)
    found = torch.zeros(3, len(rows), length, dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        found[0, i, :end] = torch.tensor([*prompt, *response])
        found[1, i, :end] = 1
        found[2, i, len(prompt) : end] = 1
    return found.unbind()


@torch.no_grad()
def logprobs(model, ids, attention, completion):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    found = logits.gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.where(completion[:, 1:] > 0, found, 0.0)


def gradient(model, ids, completion):
    """The gradient by the log-prob of each response token."""
    by_logits, logits = model.kept.grad[:, :-1], model.kept[:, :-1].detach()
    own = by_logits.gather(2, ids[:, 1:, None]).squeeze(2)
    probabilities = logits.softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.where(completion[:, 1:] > 0, own / (1 - probabilities), 0.0)


def trainer(kind, policy, reference, **options):
    made = object.__new__(kind)
    defaults = dict(
        accelerator=Accelerator(cpu=True), model=policy, ref_model=reference, beta=0.1, label_smoothing=0.0,
        _metrics=defaultdict(lambda: defaultdict(list)), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=False, f_divergence_type="reverse_kl", use_weighting=False, loss_weights=[1.0],
        _total_train_tokens=0, desirable_weight=1.0, undesirable_weight=1.0, use_liger_kernel=False,
        calculate_KL=options.get("loss_type") == "kto", alpha=0.0, simpo_gamma=0.5,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
    )  # fmt: skip
    made.__dict__.update(defaults | options)
    return made


def main() -> None:
    torch.set_default_dtype(torch.float64)
    draw = np.random.RandomState(3)
    prompts = [draw.randint(1, VOCAB, size).tolist() for size in PROMPTS]
    rows = [(prompts[i], draw.randint(1, VOCAB, size).tolist()) for i, pair in enumerate(RESPONSES) for size in pair]
    mixed = [(rows[i][0], rows[other][1]) for i, other in enumerate(PARTNER)]
    policy, reference = llama(1), llama(0)  # so that z0 is above 0
    policy.train()
    main_rows, kl_rows = padded(rows), padded(mixed)
    arrays = {
        "mask": main_rows[2][:, 1:] > 0, "kl_mask": kl_rows[2][:, 1:] > 0, "labels": LABELS, "partner": PARTNER,
        "policy": logprobs(policy, *main_rows), "reference": logprobs(reference, *main_rows),
        "kl_policy": logprobs(policy, *kl_rows), "kl_reference": logprobs(reference, *kl_rows),
    }  # fmt: skip

    def record(name, loss, grad):
        arrays[f"{name}/loss"], arrays[f"{name}/grad"] = loss.detach(), grad

    ids, attention, completion = main_rows
    order = torch.tensor([*range(0, 10, 2), *range(1, 10, 2)])  # TRL has all chosen rows first
    for name, options in DPO.items():
        made = trainer(DPOTrainer, policy, reference, **options)
        inputs = dict(input_ids=ids[order], attention_mask=attention[order], completion_mask=completion[order])
        loss = made._compute_loss(policy, inputs, False)
        loss.backward()
        grad = torch.zeros_like(arrays["policy"])
        grad[order] = gradient(policy, ids[order], completion[order])
        record(f"DPOTrainer/{name}", loss, grad)
    for name, options in KTO.items():
        made = trainer(KTOTrainer, policy, reference, **options)
        inputs = dict(
            input_ids=ids, attention_mask=attention, completion_mask=completion, label=torch.tensor(LABELS),
            KL_input_ids=kl_rows[0], KL_attention_mask=kl_rows[1], KL_completion_mask=kl_rows[2],
        )  # fmt: skip
        loss = made._compute_loss(policy, inputs, False)
        loss.backward()
        record(f"KTOTrainer/{name}", loss, gradient(policy, ids, completion))
    leaf = arrays["policy"].clone().requires_grad_()
    sums, lengths = torch.where(arrays["mask"], leaf, 0).sum(1), arrays["mask"].sum(1)
    found = {
        "CPOTrainer/sigmoid,beta=0.3": trainer(CPOTrainer, None, None, loss_type="sigmoid", beta=0.3).cpo_loss(
            sums[0::2], sums[1::2]
        )[0],
        "CPOTrainer/simpo,beta=2,gamma=0.5": trainer(CPOTrainer, None, None, loss_type="simpo", beta=2.0).cpo_loss(
            (sums / lengths)[0::2], (sums / lengths)[1::2]
        )[0],
        "ORPOTrainer/beta=0.3": -trainer(ORPOTrainer, None, None, beta=0.3).odds_ratio_loss(
            (sums / lengths)[0::2], (sums / lengths)[1::2]
        )[0],
    }
    for name, losses in found.items():
        record(name, losses.mean(), torch.autograd.grad(losses.mean(), leaf, retain_graph=True)[0])
    path = HERE / "preference_trl.npz"
    np.savez_compressed(path, **{name: np.asarray(value) for name, value in arrays.items()})
    print(f"{len(arrays)} arrays, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
