"""`python tests/unit/goldens/make_steps.py`: the golden arrays of tests/unit/test_process_reward.py, computed by TRL's
own code. No test runs this script. The environment is that of `trl` in make_online.py.

TRL 1.12.0, trl/experimental/prm/prm_trainer.py: PRMTrainer.compute_loss, on an object made without __init__, of a tiny
random LlamaForTokenClassification with two classes (0: wrong, 1: right) and with weights that hide no mistake, in
float32. Rows are padded at the right and labelled at the ends of steps; -100 elsewhere.

Arrays: input_ids, attention_mask, labels (B, S); logits (B, S, 2); loss; weight/NAME and, of the loss's gradient by
each of them, squares/NAME, the sum of its squares, and grad/score.weight, grad/score.bias.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

ROWS, COLUMNS = 5, 18
CONFIG = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, max_position_embeddings=32, pad_token_id=0, eos_token_id=7,
)  # fmt: skip


def main() -> None:
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForTokenClassification
    from trl.experimental.prm import PRMConfig, PRMTrainer

    torch.manual_seed(0)
    model = LlamaForTokenClassification(LlamaConfig(**CONFIG, num_labels=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    ids = torch.randint(8, CONFIG["vocab_size"], (ROWS, COLUMNS))
    lengths = torch.tensor([18, 5, 11, 2, 16])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    labels = torch.where(torch.rand(ROWS, COLUMNS) < 0.3, torch.randint(0, 2, (ROWS, COLUMNS)), -100)
    labels[torch.arange(ROWS), lengths - 1] = torch.tensor([1, 0, 0, 1, 1])  # the last steps'
    labels[:, 0] = -100
    labels = torch.where(mask > 0, labels, -100)
    ids = ids * mask

    trainer = object.__new__(PRMTrainer)
    trainer.__dict__.update(
        args=PRMConfig(output_dir="unused", use_cpu=True, report_to=[]), accelerator=Accelerator(cpu=True),
        label_smoother=None, compute_loss_func=None, model_accepts_loss_kwargs=False,
    )  # fmt: skip
    inputs = dict(input_ids=ids, attention_mask=mask, labels=labels)
    loss, outputs = trainer.compute_loss(model, dict(inputs), return_outputs=True)
    loss.backward()
    arrays = {name: value.numpy() for name, value in inputs.items()}
    arrays |= {"logits": outputs["logits"].detach().numpy(), "loss": loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        arrays[f"weight/{name}"] = parameter.detach().numpy()
        arrays[f"squares/{name}"] = parameter.grad.double().square().sum().numpy()
    arrays |= {f"grad/score.{name}": value.grad.numpy() for name, value in model.score.named_parameters()}
    path = Path(__file__).parent / "steps_trl.npz"
    np.savez_compressed(path, **arrays)
    print(f"{len(arrays)} arrays, {path.stat().st_size} bytes, {int((labels >= 0).sum())} labels, loss {loss:.6f}")


if __name__ == "__main__":
    main()
