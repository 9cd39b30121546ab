"""The sampler against `generate` of transformers: the same weights, prompts and lengths, one thread, fp32.

    python -m bench.sampler [--quick] [--runs N] [--only TEXT ...] [--old DIR] [--json FILE]

Each system is a process of its own, and they take turns; every other run goes through them backwards. The figures are
tokens a CPU second, medians over runs; a ratio is the median of the ratios of the runs with the same number, with the
smallest and the largest. `old` is the megarlhf of another checkout, DIR. The cases, in order:

    fixed    responses of R tokens. transformers runs without an EOS token and without filters, so it computes only what
             sampling of this length needs
    ragged   the responses end with EOS after 10% to 70% of R tokens, the same in every system (ends.py). Only tokens up
             to the ends count, and the time that forces the ends does not
    refill   R = 4 P, eight sequences for each slot, ends uniform up to R. transformers samples batch after batch
    length   CPU microseconds a token at some fixed lengths, without the prompt's pass
    memory   the peak resident set of a fresh process during sampling, minus its resident set after the weights were
             loaded
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
MODEL = dict(num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4,
             vocab_size=32000, max_position_embeddings=2048, initializer_range=0.05)  # fmt: skip
PROMPT = 64  # P
RAGGED = (0.1, 0.7)  # lengths of responses, as fractions of R
CASES = ("fixed", "ragged", "refill", "length", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs and sizes: under a minute")
    parser.add_argument("--runs", type=int, help="of each case and system (5; quick: 2)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="only these cases")
    parser.add_argument("--old", type=Path, metavar="DIR", help="another checkout of this project, to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    if arguments.old and not (arguments.old / "megarlhf").is_dir():
        parser.error(f"--old: {arguments.old} has no megarlhf/")
    runs = arguments.runs or (2 if arguments.quick else 5)
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        models(Path(directory))
        for figure in measure(Path(directory), arguments.quick, runs, arguments.only, arguments.old):
            figures.append(figure)
            report(figure)
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(directory: Path, quick: bool, runs: int, only: list[str], old: Path | None):
    """The figures of each case, one after another."""
    roots = {"ours": ROOT} | ({"old": old.resolve()} if old else {})
    systems = {name: Child("megarlhf", directory, root) for name, root in roots.items()}
    systems["theirs"] = Child("transformers", directory, ROOT)
    for child in systems.values():
        child.ask(**case(2, response=2))  # warms up
    rows = (32,) if quick else (32, 64)
    if "fixed" in only:
        for count in rows:
            yield compare("fixed", systems, runs, case(count))
            yield compare("greedy", systems, runs, case(count, greedy=True))
    if "ragged" in only:
        for count in rows:
            yield compare("ragged", systems, runs, case(count, ends=RAGGED))
    if "refill" in only:
        slots, response = (4, 64) if quick else (32, 4 * PROMPT)
        yield compare("refill", systems, runs, case(8 * slots, slots=slots, response=response, ends=(0, 1)))
    if "length" in only:
        for response in (16, 64) if quick else (16, 64, 256):
            yield length({name: systems[name] for name in roots}, runs, response)
    for child in systems.values():
        child.close()
    if "memory" in only:
        for count in rows if quick else (32, 64, 128):
            for name, root in roots.items():
                child = Child("megarlhf", directory, root)
                yield {"case": "memory", "system": name, **child.ask(**case(count, what="memory"))}
                child.close()


def case(prompts: int, *, slots: int = 0, response: int = 64, greedy: bool = False, ends=None, what="sample") -> dict:
    """A request to a child. slots: sequences at once; 0: all."""
    return dict(
        what=what, prompts=prompts, columns=PROMPT, slots=slots or prompts, response=response, greedy=greedy, ends=ends
    )


class Child:
    """A process that answers requests (sampler_child.py)."""

    def __init__(self, system: str, directory: Path, root: Path):
        command = [sys.executable, str(ROOT / "bench" / "sampler_child.py"), system, str(directory)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            command, env={**os.environ, **THREADS, "PYTHONPATH": str(root)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip

    def ask(self, **request) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        sys.exit(f"{' '.join(self.process.args)} failed:\n{self.errors.read()[-4000:]}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(name: str, systems: dict[str, Child], runs: int, request: dict) -> dict:
    """Tokens a CPU second of every system in every run, and for greedy the share of our tokens that equal theirs."""
    rates, forcing = {system: [] for system in systems}, {system: [] for system in systems}
    for number in range(runs):
        answers = {}
        for system in list(systems)[:: 1 if number % 2 == 0 else -1]:
            answers[system] = systems[system].ask(**request)
            rates[system].append(answers[system]["tokens"] / answers[system]["cpu"])
            forcing[system].append(answers[system]["forcing"])
        assert len({answer["tokens"] for answer in answers.values()}) == 1, "other ends in another system"
    figure = {
        "case": name,
        **{key: request[key] for key in ("prompts", "slots", "response")},
        "tokens": answers["ours"]["tokens"],
        "rates": rates,
        "ratios": {system: ratio(rates["ours"], rates[system]) for system in systems if system != "ours"},
        "forcing": {system: statistics.median(seconds) for system, seconds in forcing.items()},
    }
    if request["greedy"]:
        pairs = [
            (own, other)
            for mine, its in zip(answers["ours"]["ids"], answers["theirs"]["ids"], strict=True)
            for own, other in zip(mine, its, strict=True)
        ]
        figure["equal_tokens"] = sum(own == other for own, other in pairs) / len(pairs)
    return figure


def ratio(own: list[float], other: list[float]) -> dict[str, float]:
    values = [a / b for a, b in zip(own, other, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def length(systems: dict[str, Child], runs: int, response: int) -> dict:
    """CPU microseconds a token at one response length, without the prompt's pass."""
    rows, found = 32, {}
    for name, child in systems.items():
        first = min(child.ask(**case(rows, response=1))["cpu"] for _ in range(runs))
        whole = min(child.ask(**case(rows, response=response))["cpu"] for _ in range(runs))
        found[name] = 1e6 * (whole - first) / (rows * (response - 1))
    return {"case": "length", "slots": rows, "response": response, "us_per_token": found}


def report(figure: dict) -> None:
    kind = figure["case"]
    if kind == "length":
        each = ", ".join(f"{name} {value:.0f}" for name, value in figure["us_per_token"].items())
        line = f"CPU us a token at response length {figure['response']}, {figure['slots']} rows: {each}"
    elif kind == "memory":
        mib = {name: value / 2**20 for name, value in figure.items() if isinstance(value, int)}
        line = f"{figure['system']}, {figure['slots']} rows: {mib['measured']:.1f} MiB at the peak above the weights' "
        line += f"{mib['weights']:.1f}"
        if "held" in mib:
            formula = mib["held"] + mib["logits"] + mib["prompts"]
            line += (
                f"; formula {formula:.1f} = caches {mib['held']:.1f} + logits {mib['logits']:.1f} + prompts "
                f"{mib['prompts']:.1f}; measured / formula {mib['measured'] / formula:.2f}"
            )
    else:
        rates = ", ".join(f"{name} {statistics.median(values):,.0f}" for name, values in figure["rates"].items())
        ratios = ", ".join(
            f"{one['median']:.2f}x {name} ({one['min']:.2f}-{one['max']:.2f})" for name, one in figure["ratios"].items()
        )
        line = f"{figure['prompts']} sequences, {figure['slots']} slots, R {figure['response']}: tokens a CPU second "
        line += f"{rates}; ours {ratios}"
        if "equal_tokens" in figure:
            line += f"; {figure['equal_tokens']:.1%} of tokens equal"
        if any(figure["forcing"].values()):
            each = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in figure["forcing"].items())
            line += f"; forcing, not counted, CPU ms: {each}"
    print(f"{kind:7} {line}", flush=True)


def models(directory: Path) -> None:
    """A random Llama of transformers and the converted one: `hf` and `ours`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megarlhf.convert.convert import hf2megatron

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL, tie_word_embeddings=False)).save_pretrained(directory / "hf")
    hf2megatron(directory / "hf", directory / "ours")


if __name__ == "__main__":
    main()
