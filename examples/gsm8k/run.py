"""A reward model from real preferences: GSM8K's train.jsonl and example_model_solutions.jsonl.

A small Llama learns from random weights to write questions and answers. A reward model starts from it and learns to
distinguish model solutions marked right from those marked wrong for the same question. The held-out questions are not
trained on. It runs on 2 CPU ranks, in minutes. A model of this size cannot compute the answers: the held-out accuracy
shows that the pipeline works, and how well the form of a solution predicts its mark.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pipeline
from reviews import train_tokenizer

HERE = Path(__file__).resolve().parent
STAGES = (("sft", "supervised fine-tuning"), ("reward", "reward model"))
TRAIN, SOLUTIONS = "train.jsonl", "example_model_solutions.jsonl"
VOCABULARY = 2000
HELD_OUT = 0.3  # of the questions with a pair
SFT_VALIDATION = 256  # questions


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/gsm8k", (TRAIN, SOLUTIONS))
    started = time.monotonic()
    held_out = write_data(args.data, args.out)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
    pipeline.report(args.out / "reward")
    summary(args.out, held_out, time.monotonic() - started)


def write_data(source: Path, out: Path) -> int:
    """Write the data of both stages, and of RL. Returns the number of held-out pairs."""
    rows = [{"prompt": prompt(row["question"]), "answer": row["answer"]}
            for row in pipeline.read(source / TRAIN, "question", "answer")]  # fmt: skip
    train_tokenizer([f"{row['prompt']} {row['answer']}" for row in rows], str(out / "tokenizer"), VOCABULARY)
    for name, part in (("train", rows[SFT_VALIDATION:]), ("validation", rows[:SFT_VALIDATION])):
        pipeline.write(
            out / f"sft.{name}.jsonl", ({"prompt": row["prompt"], "response": " " + row["answer"]} for row in part)
        )
        pipeline.write(out / f"questions.{name}.jsonl", part)  # of rl.yaml
    questions = pipeline.shuffled(filter(None, map(pairs, pipeline.read(source / SOLUTIONS, "question"))), seed=0)
    cut = round(len(questions) * HELD_OUT)
    counts = {}
    for name, part in (("validation", questions[:cut]), ("train", questions[cut:])):
        counts[name] = pipeline.write(out / f"preferences.{name}.jsonl", (pair for of_one in part for pair in of_one))
    pipeline.write(out / "prompts.jsonl", ({"prompt": of_one[0]["prompt"]} for of_one in questions[cut:]))
    total = sum(counts.values())
    print(f"{total} pairs of {len(questions)} questions; held out: {counts['validation']} pairs of {cut} questions")
    return counts["validation"]


def pairs(row: dict) -> list[dict[str, str]]:
    """Pairs of every right and every wrong solution of a question."""
    solutions = [value for value in row.values() if isinstance(value, dict)]
    for key in ("solution", "is_correct"):
        if any(key not in solution for solution in solutions):
            sys.exit(f"{SOLUTIONS}: a solution to {row['question'][:60]!r} has no {key}; give the data set's own file")
    right, wrong = ([response(s["solution"]) for s in solutions if s["is_correct"] is mark] for mark in (True, False))
    return [{"prompt": prompt(row["question"]), "chosen": r, "rejected": w} for r in right for w in wrong]


def prompt(question: str) -> str:
    """The prompt of a question, the same in both stages."""
    return f"Question: {question}\nAnswer:"


def response(solution: str) -> str:
    """A model's solution in the format of train.jsonl, with the result after ####."""
    return " " + solution.replace("\nA: ", "\n#### ")


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of `count` trials; z = 1.96 for 95% confidence."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


def summary(out: Path, held_out: int, seconds: float) -> None:
    """Print the results on the held-out questions."""
    perplexity = pipeline.column(out / "sft", "validation/perplexity")
    accuracy = pipeline.column(out / "reward", "validation/accuracy")
    low, high = wilson(accuracy[-1], held_out)
    print(f"\n== done in {seconds / 60:.1f} minutes")
    print(f"  SFT     held-out perplexity  {perplexity[0]:8.1f} -> {perplexity[-1]:.1f}")
    print(f"  reward  held-out accuracy    {accuracy[0]:8.1%} -> {accuracy[-1]:.1%}")
    print(f"          95% interval         {low:8.1%} to {high:.1%} (Wilson, {held_out} pairs)")
    print(f"  report  {out / 'reward' / 'report.html'}")


if __name__ == "__main__":
    main()
