"""SFT -> RL with a verifier, on sums that this script writes: no download, no reward model, no critic.

A tiny Llama reads sums of one to three steps, such as "7-5+4=". SFT shows it two kinds of responses: most are rough,
the result rounded to tens ("10"), few have the steps ("2+4=6"). RL has other sums and no solutions: the verifier
compares the last number with the answer. It finds out that steps are worth their length, and then makes fewer mistakes
in them. The held-out sums are in neither stage. It runs on 2 CPU ranks, in minutes.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pipeline
from reviews import train_tokenizer

HERE = Path(__file__).resolve().parent
STAGES = (("sft", "supervised fine-tuning"), ("rl", "RL with a verifier"))
MOST = 9  # the largest result, also on the way
DRAWS = 10000  # sums of each number of steps; fewer without those drawn twice
HELD_OUT = 100  # of each number of steps, at most a fifth; SFT has the rest of the first half, RL the second half
SAMPLES = 8  # evaluation.samples of rl.yaml
ROUGH = 3  # rough responses to each sum of SFT, beside the one with the steps


def main() -> None:
    args = pipeline.arguments(__doc__, "runs/arithmetic")
    started = time.monotonic()
    write_data(args.out)
    for number, (program, title) in enumerate(STAGES, start=1):
        print(f"\n== {number}/{len(STAGES)}  {title}", flush=True)
        pipeline.stage(program, HERE / f"{program}.yaml", args.out, f"seed={args.seed}")
    pipeline.report(args.out / "rl")
    summary(args.out, time.monotonic() - started)


def write_data(out: Path) -> None:
    """Write the tokenizer, whose tokens are characters, and the JSONL files; SFT, RL and evaluation share no sum."""
    held_out, solved, others = [], [], []
    for steps in (1, 2, 3):
        sums = problems(steps)
        first, second = min(HELD_OUT, len(sums) // 5), len(sums) // 2
        held_out += sums[:first]
        solved += sums[first:second]
        others += sums[second:]
    lines = [{"prompt": prompt(terms), "response": text} for terms in solved for text in responses(terms)]
    train_tokenizer([line["prompt"] + line["response"] for line in lines], str(out / "tokenizer"), characters=True)
    pipeline.write(out / "sft.jsonl", lines)
    for name, sums in (("held_out", held_out), ("prompts", others)):
        pipeline.write(out / f"{name}.jsonl", ({"prompt": prompt(terms), "answer": str(sum(terms))} for terms in sums))


def responses(terms: tuple[int, ...]) -> list[str]:
    """SFT's responses to a sum: rough ones, and the steps."""
    return [str(round(sum(terms), -1))] * ROUGH + [solution(terms)]


def problems(steps: int) -> list[tuple[int, ...]]:
    """Different sums of so many steps, in a random order: their terms."""
    random_ = random.Random(steps)
    return list(dict.fromkeys(problem(random_, steps) for _ in range(DRAWS)))


def problem(random_: random.Random, steps: int) -> tuple[int, ...]:
    """The terms of a sum; all results are from 1 to MOST."""
    terms = [random_.randint(1, MOST)]
    for _ in range(steps):
        result = random_.choice([other for other in range(1, MOST + 1) if other != sum(terms)])
        terms.append(result - sum(terms))
    return tuple(terms)


def prompt(terms: tuple[int, ...]) -> str:
    """(7, -5, 4) -> 7-5+4="""
    return written(terms) + "="


def solution(terms: tuple[int, ...]) -> str:
    """(7, -5, 4) -> 2+4=6"""
    return "=".join(written((sum(terms[:done]), *terms[done:])) for done in range(2, len(terms) + 1))


def written(terms: tuple[int, ...]) -> str:
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:])


def summary(out: Path, seconds: float) -> None:
    """Print the course of the held-out sums, and a response from before and after RL."""
    names = ("greedy", "pass@1", f"pass@{SAMPLES}", "response_length")
    columns = [pipeline.column(out / "rl", f"evaluation/{name}") for name in names]
    steps = [row["step"] for row in pipeline.read(out / "rl" / "metrics.jsonl") if "evaluation/greedy" in row]
    print(f"\n== done in {seconds / 60:.1f} minutes; held-out sums:")
    print(f"  {'step':>4}  {'greedy':>7}  {'pass@1':>7}  {f'pass@{SAMPLES}':>7}  tokens")
    for step, greedy, one, many, length in zip(steps, *columns, strict=True):
        print(f"  {step:4}  {greedy:7.1%}  {one:7.1%}  {many:7.1%}  {length:6.1f}")
    samples = list(pipeline.read(out / "rl" / "held_out.jsonl"))
    query = samples[-1]["query"]
    first, *_, last = (sample for sample in samples if sample["query"] == query)
    print(f"  before  {query}{first['response']}\n  after   {query}{last['response']}")
    print(f"  report  {out / 'rl' / 'report.html'}")


if __name__ == "__main__":
    main()
