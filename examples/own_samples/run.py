"""Learning from own samples on the demo's reviews: RAFT, iterative DPO or conditional SFT, on 2 CPU ranks, in minutes.

    python examples/own_samples/run.py raft|dpo|conditional [--seed N]

The first policy is the demo's SFT model and the reward its reward model (make demo); both are trained first where they
are missing. `megarlhf rounds` runs the chain of NAME.yaml. Then each policy writes reviews for held-out prompts, which
the grammar's true judge reads. The same command continues after a kill: complete stages are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import demo
import pipeline
import yaml

HERE = Path(__file__).resolve().parent
OUT = pipeline.ROOT / "runs" / "own_samples"
PROMPTS = 500  # of the chain; as many others are held out
LAUNCH = f"launch={sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2"
ASKED = {"high": 4, "low": 0}  # levels of conditional.yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chain", choices=("raft", "dpo", "conditional"))
    parser.add_argument("--seed", type=int, default=0, help="of the chain")
    args = parser.parse_args()
    started = time.monotonic()
    first_models()
    rounds(args.chain, args.seed)
    if args.chain == "conditional":
        judge_conditional()
    else:
        judge_rounds(args.chain)
    print(f"== done in {(time.monotonic() - started) / 60:.1f} minutes")


def first_models() -> None:
    """The demo's SFT and reward model, and the prompts."""
    OUT.mkdir(parents=True, exist_ok=True)
    if not (demo.OUT / "reviews.model").exists():
        demo.OUT.mkdir(parents=True, exist_ok=True)
        demo.write_data(demo.OUT)
    for program in ("sft", "reward"):
        if not (demo.OUT / program / "checkpoints" / "latest").exists():
            pipeline.stage(program, demo.CONFIGS / f"demo_{program}.yaml", pipeline.ROOT)
    rows = list(pipeline.read(demo.OUT / "prompts.jsonl"))
    pipeline.write(OUT / "prompts.jsonl", rows[:PROMPTS])
    pipeline.write(OUT / "held_out.jsonl", rows[PROMPTS : 2 * PROMPTS])


def rounds(chain: str, seed: int) -> None:
    config = str(HERE / f"{chain}.yaml")
    command = [sys.executable, "-m", "megarlhf", "rounds", "--config", config, f"seed={seed}", LAUNCH]
    status = subprocess.run(command, cwd=pipeline.ROOT, env=pipeline.environment())
    if status.returncode:
        sys.exit(status.returncode)


def judge_rounds(chain: str) -> None:
    """Print how many reviews of each policy are positive."""
    settings = yaml.safe_load((HERE / f"{chain}.yaml").read_text())
    trainer = "sft" if "sft" in settings else "dpo"
    policies = {"first": pipeline.ROOT / settings["model"]}
    policies |= {f"round {n}": OUT / chain / f"round_{n}" / trainer for n in range(1, settings["rounds"] + 1)}
    shown = {name: sampled(chain, name, policy) for name, policy in policies.items()}
    print("\n  policy        positive by the true judge, held-out prompts")
    for name, samples in shown.items():
        print(f"  {name:<12}  {demo.positive(samples):6.1%}   {samples[0]['prompt']} | {samples[0]['response']}")


def judge_conditional() -> None:
    """Print how many reviews are positive where a high score was asked for, and a low one."""
    settings = yaml.safe_load((HERE / "conditional.yaml").read_text())["select"]
    told = [f"{key}={json.dumps(settings[key])}" for key in ("template", "values", "levels", "words")]
    shown = {"first": sampled("conditional", "first", demo.OUT / "sft")}
    for name, level in ASKED.items():
        prompts = OUT / "conditional" / f"prompts_{name}.jsonl"
        command = [
            sys.executable, "-m", "megarlhf", "select", "--input", str(OUT / "held_out.jsonl"), "--out", str(prompts),
            "--kind", "ask", f"ask={{score: {level}}}", *told,
        ]  # fmt: skip
        if subprocess.run(command, cwd=pipeline.ROOT, env=pipeline.environment()).returncode:
            sys.exit(2)
        shown[name] = sampled("conditional", name, OUT / "conditional" / "round_1" / "sft", prompts)
    print("\n  asked for     positive by the true judge, held-out prompts")
    for name, samples in shown.items():
        print(
            f"  {'nothing' if name == 'first' else name:<12}  {demo.positive(samples):6.1%}   {samples[0]['response']}"
        )


def sampled(chain: str, name: str, policy: Path, prompts: Path = OUT / "held_out.jsonl") -> list[dict]:
    """A review of the policy for each of the prompts, sampled as in the chain, with other noise."""
    out = OUT / chain / f"judged_{name.replace(' ', '_')}.jsonl"
    saved = policy / "checkpoints" / "latest"
    if not out.exists() or out.stat().st_mtime < saved.stat().st_mtime:
        overrides = {"checkpoint": policy, "out": out, "prompts.path": prompts, "prompts.length": 32, "seed": 1000,
                     "sampler.samples_per_prompt": 1}  # fmt: skip
        given = (f"{key}={value}" for key, value in overrides.items())
        pipeline.stage("generate", OUT / chain / "round_1" / "generate.yaml", pipeline.ROOT, *given)
    return list(pipeline.read(out))


if __name__ == "__main__":
    main()
