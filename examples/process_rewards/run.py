"""SFT -> process reward model -> RL with its scores, on sums that this script writes in steps: no download.

A tiny Llama reads sums such as "7-5+4=" and answers with steps, "7-5=2;2+4=6". The process reward model learns from
solutions of which half have one wrong step: its result is wrong, or it takes a wrong term; later steps are right with
what they were given. It is measured on held-out solutions by the first wrong step. Then it chooses among 16 responses
that the SFT model samples for each held-out sum, and is the reward of RL. It runs on 2 CPU ranks, in minutes.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pipeline
from reviews import train_tokenizer

HERE = Path(__file__).resolve().parent
STAGES = (("sft", "supervised fine-tuning"), ("prm", "process reward model"), ("rl", "RL with process rewards"))
MOST = 9  # the largest result, also on the way
STEPS = (3, 5)  # of a sum, least and most
SEPARATOR = ";"
SOLVED, JUDGED, HELD_OUT, PROMPTS = 4000, 24000, 1000, 64  # SFT; PRM, its held-out ones; RL and best-of-N
SAMPLES = 16  # of each of PROMPTS: sampler.samples_per_prompt of rl.yaml


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/process_rewards")
    started = time.monotonic()
    write_data(args.out)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
    summary(args.out, time.monotonic() - started)


def write_data(out: Path) -> None:
    """Write the tokenizer, whose tokens are characters, and the JSONL files, which share no sum."""
    draw = random.Random(0)
    sums = list(dict.fromkeys(problem(draw) for _ in range(3 * (SOLVED + JUDGED))))
    parts = iter(sums)
    solved, judged, held_out, prompts = ([next(parts) for _ in range(n)] for n in (SOLVED, JUDGED, HELD_OUT, PROMPTS))
    lines = [{"prompt": prompt(terms), "response": SEPARATOR.join(solution(terms))} for terms in solved]
    train_tokenizer([line["prompt"] + line["response"] for line in lines], str(out / "tokenizer"), characters=True)
    pipeline.write(out / "sft.jsonl", lines)
    pipeline.write(out / "steps.jsonl", (labelled(draw, terms) for terms in judged))
    pipeline.write(out / "held_out_steps.jsonl", (labelled(draw, terms) for terms in held_out))
    pipeline.write(out / "prompts.jsonl", ({"prompt": prompt(terms), "answer": str(sum(terms))} for terms in prompts))


def problem(draw: random.Random) -> tuple[int, ...]:
    """The terms of a sum; all results are from 1 to MOST."""
    terms = [draw.randint(1, MOST)]
    for _ in range(draw.randint(*STEPS)):
        terms.append(draw.choice([other for other in range(1, MOST + 1) if other != sum(terms)]) - sum(terms))
    return tuple(terms)


def prompt(terms: tuple[int, ...]) -> str:
    """(7, -5, 4) -> 7-5+4="""
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:]) + "="


def solution(terms: tuple[int, ...], mistake: dict[int, tuple[int, int]] | None = None) -> list[str]:
    """(7, -5, 4) -> 7-5=2, 2+4=6; `mistake`: {step: (its term, its result)}."""
    steps, before = [], terms[0]
    for number, term in enumerate(terms[1:]):
        term, result = (mistake or {}).get(number, (term, before + term))
        steps.append(f"{before}{term:+d}={result}")
        before = result
    return steps


def labelled(draw: random.Random, terms: tuple[int, ...]) -> dict:
    """A line of the process reward model: half of the solutions have a wrong step. The steps after it have no label."""
    last = len(terms) - 1
    wrong = draw.randrange(last) if draw.random() < 0.5 else last
    mistake = {} if wrong == last else planted(draw, terms, wrong)
    return {
        "prompt": prompt(terms),
        "steps": solution(terms, mistake),
        "labels": [None if number > wrong else number < wrong for number in range(last)],
    }


def planted(draw: random.Random, terms: tuple[int, ...], step: int) -> dict[int, tuple[int, int]]:
    """A wrong result of this step, or a wrong term with its right result."""
    before, term = sum(terms[: step + 1]), terms[step + 1]
    others = [result for result in range(1, MOST + 1) if result not in (before, before + term)]
    result = draw.choice(others)
    return {step: (result - before, result) if draw.random() < 0.5 else (term, result)}


def summary(out: Path, seconds: float) -> None:
    """Print the held-out metrics of the process reward model, the best of N, and the course of RL."""
    names = ("accuracy", "first_error", "first_error/wrong", "first_error/right")
    columns = [pipeline.column(out / "prm", f"validation/{name}") for name in names]
    print(f"\n== done in {seconds / 60:.1f} minutes; {HELD_OUT} held-out solutions, before and after training:")
    for name, values in zip(names, columns, strict=True):
        print(f"  {name:18}  {values[0]:6.1%}  {values[-1]:6.1%}")
    rows = [row for row in pipeline.read(out / "rl" / "samples.jsonl") if row["step"] == 1]
    print(f"  right results among {SAMPLES} samples of the SFT model, {len(rows) // SAMPLES} sums:")
    for name, share in best_of(rows).items():
        print(f"    {name:22}  {share:6.1%}")
    right = pipeline.column(out / "rl", "scores/right/mean")
    print(f"  right results of a batch of RL, first and last: {right[0]:.1%}, {right[-1]:.1%}")


def best_of(rows: list[dict]) -> dict[str, float]:
    """The share of prompts whose chosen response has the right result, by the rule that chooses."""
    groups = [list(group) for _, group in groupby(sorted(rows, key=lambda row: row["query"]), lambda row: row["query"])]
    found = Counter()
    for group in groups:
        right = [row["scores"]["right"] for row in group]
        results = [(re.findall(r"-?\d+", row["response"]) or [""])[-1] for row in group]
        common = Counter(results).most_common(1)[0][0]
        found["one at random"] += sum(right) / len(right)
        found["the most common result"] += right[results.index(common)]
        found["the best by its steps"] += right[max(range(len(group)), key=lambda i: group[i]["scores"]["steps"])]
        found["any of them"] += max(right)
    return {name: value / len(groups) for name, value in found.items()}


if __name__ == "__main__":
    main()
