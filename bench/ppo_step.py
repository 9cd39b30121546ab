"""One PPO step against TRL's PPO trainer (`trl==1.12.0`, the last release that has one).

    python -m bench.ppo_step [--quick] [--runs N] [--processes 1 2] [--only TEXT] [--old DIR] [--systems NAME ...]
                             [--trl PYTHON] [--json FILE] [--png FILE]
    python -m bench.ppo_step --gpu --trl PYTHON [--quick]      a stage of bench.gpu, which it prints its figures for

The same Llama weights (policy, reward model; the critic starts from the reward model), prompts, lengths, batch and
epochs, float32, one thread a process. The systems alternate, run by run, each in fresh processes, and every other run
goes through them backwards. The figures are medians over runs of the median step, without the first and the last step
of a run; the ratios of two systems are of the runs with the same number. CPU seconds are the sum over all threads and
processes. Peak memory is the sum of the processes' peak resident sets. TRL has its own virtual environment (build/trl,
made at the first call, with the torch and transformers of constraints.txt).

`old` is the megarlhf of another checkout, DIR, with the same model and configuration. In a `ragged` configuration the
responses end with EOS after 10% to 70% of R tokens, the same numbers in every system (ends.py).

`shared` is megarlhf with the value head on the actor's trunk, which TRL does not have; `lora` is megarlhf with adapters
of rank 8 on all linear layers of policy and critic. TRL computes all rows at once,
its default; `trl-8` is TRL in micro-batches of 8, which need less memory. megarlhf computes 8 rows at a time, all rows
with the small vocabulary, and 16 rows with two processes. For two processes the throughput against one process is also
measured, in wall seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRL = ROOT / "build" / "trl"
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
PHASES = ("generation", "scoring", "training", "other")
PROMPT = 64
CONFIGURATIONS = {
    "L4 H256 V32000 B32 R24 E4": dict(layers=4, hidden=256, vocab=32000, batch=32, response=24, epochs=4, rows=8),
    "L2 H128 V2048 B32 R24 E4": dict(layers=2, hidden=128, vocab=2048, batch=32, response=24, epochs=4, rows=32),
    "L4 H256 V32000 B16 R64 E1": dict(layers=4, hidden=256, vocab=32000, batch=16, response=64, epochs=1, rows=8),
}
GPU = {  # the larger one on a GPU
    "cuda": {"L16 H1024 V32000 B256 R128 E1": dict(layers=16, hidden=1024, vocab=32000, batch=256, response=128,
                                                   epochs=1, rows=128)},
    "cpu": {"L2 H64 V2048 B8 R8 E1": dict(layers=2, hidden=64, vocab=2048, batch=8, response=8, epochs=1, rows=8)},
}  # fmt: skip
RAGGED = {"ends": (0.1, 0.7)}  # lengths of responses, as fractions of R
CONFIGURATIONS |= {
    "L4 H256 V32000 B32 R96 E4 ragged": CONFIGURATIONS["L4 H256 V32000 B32 R24 E4"] | {"response": 96} | RAGGED,
    "L2 H128 V2048 B32 R24 E4 ragged": CONFIGURATIONS["L2 H128 V2048 B32 R24 E4"] | RAGGED,
}
OURS = {
    "megarlhf": dict(system="megarlhf", overrides=["critic.kind=separate", "critic.checkpoint={models}/reward"]),
    "shared": dict(system="megarlhf", overrides=["critic.kind=shared"]),
}
LORA = ["model.lora.rank=8", "model.lora.alpha=16"]
SYSTEMS = {
    "trl": dict(system="trl", micro_batch=1024),
    "megarlhf": OURS["megarlhf"],
    "trl-8": dict(system="trl", micro_batch=8),
    "shared": OURS["shared"],
    "lora": OURS["megarlhf"] | {"overrides": OURS["megarlhf"]["overrides"] + LORA},
}
FILES = {"policy": "hf_policy", "reward": "hf_reward", "prompts": "prompts.json"}
# Two processes: data parallel for both systems; tensor parallel for megarlhf alone. For the speed-up: `one` process;
# and two processes `apart`, without communication, with half of the batch each, which is the machine's upper bound.
TWO = {"trl": [], "megarlhf": [], "tp2": ["parallel.tensor=2", "parallel.sequence=true"], "one": [], "apart": []}
ALONE = {"one": (1, 1), "apart": (1, 2)}  # (processes of a run, number of such runs at the same time)
UNFORCED = ("tp2", "apart")  # not measured with forced ends: under tensor parallelism a rank has only some logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small model, one run of each: under a minute")
    parser.add_argument("--runs", type=int, default=3, help="of each system and configuration")
    parser.add_argument("--processes", type=int, nargs="+", choices=[1, 2], help="of a run (1 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations whose name has this in it")
    parser.add_argument("--old", type=Path, metavar="DIR", help="another checkout of this project, to compare with")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only these: trl megarlhf old trl-8 shared tp2 ..."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a bar chart (needs matplotlib)")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="of an environment with TRL, instead of build/trl")
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gpu:
        for figure in on_device(arguments.trl, arguments.quick):
            print(json.dumps(figure), flush=True)
        return
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    if arguments.old and not (arguments.old / "megarlhf").is_dir():
        parser.error(f"--old: {arguments.old} has no megarlhf/")
    if unknown := set(arguments.systems or ()) - {*SYSTEMS, *TWO, *(["old"] if arguments.old else [])}:
        parser.error(f"--systems: no {', '.join(sorted(unknown))}; old needs --old DIR")
    names = [name for name in CONFIGURATIONS if arguments.only in name and (not arguments.quick or "V2048" in name)]
    if not names:
        parser.error(f"--only: no configuration has {arguments.only!r} in its name; there are {[*CONFIGURATIONS]}")
    needs_trl = not arguments.systems or any(name.startswith("trl") for name in arguments.systems)
    python = (arguments.trl or environment()) if needs_trl else None
    figures = []
    for name in names[:1] if arguments.quick else names:
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory), CONFIGURATIONS[name], python, arguments.old)
            for processes in arguments.processes or ([1] if arguments.quick else [1, 2]):
                systems = bench.measure(processes, arguments.runs, arguments.quick, arguments.systems)
                if not systems:
                    continue
                figures.append({"configuration": name, "processes": processes, "systems": systems,
                                "pairs": pairs(systems)})  # fmt: skip
                report(figures[-1])
                if arguments.json:  # after each configuration, because all of them take an hour
                    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.png:
        draw(figures, arguments.png)


def on_device(python: Path, quick: bool):
    """The figures of a stage of bench.gpu: wall seconds and peak memory of a step, on the GPU if there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, sizes in GPU["cpu" if quick else device].items():
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory), sizes | {"device": device}, python, None)
            found = {system: bench.run(bench.systems(1, True)[system], 1, 1, steps=4) for system in ("megarlhf", "trl")}
        totals = {system: sum(one[phase]["wall"] for phase in PHASES) for system, one in found.items()}
        for system, one in found.items():
            ratios = totals[system] / totals["trl"], one["peak"] / found["trl"]["peak"]
            yield {"what": f"{system}, {name}: a step", "value": totals[system], "unit": "s", "share": ratios[0],
                   "of": "TRL's"}  # fmt: skip
            for phase in PHASES:
                yield {"what": f"{system}: {phase}", "value": one[phase]["wall"], "unit": "s"}
            yield {"what": f"{system}: peak memory", "value": one["peak"] / 2**20, "unit": "MiB", "share": ratios[1],
                   "of": "TRL's"}  # fmt: skip


def environment() -> Path:
    """The Python of the environment with TRL, whose packages are installed at the first call."""
    python, done = TRL / "bin" / "python", TRL / ".installed"
    if not done.exists():
        print(f"installing trl==1.12.0 in {TRL}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(TRL)], check=True)
        pins = str(ROOT / "constraints.txt")
        torch = next(line for line in Path(pins).read_text().splitlines() if line.startswith("torch=="))
        for packages in ([torch], ["trl==1.12.0", "transformers"]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", "-c", pins, *packages], check=True)
        done.touch()
    return python


class Bench:
    """The models and prompts of one configuration, and its runs. `python`: TRL's; `old`: another checkout."""

    def __init__(self, directory: Path, sizes: dict, python: Path | None, old: Path | None):
        self.directory, self.sizes, self.python, self.old, self.count = directory, sizes, python, old, 0
        models(directory, sizes)

    def measure(self, processes: int, runs: int, quick: bool, only: list[str] | None) -> dict[str, dict]:
        """{system: {phase: {"cpu", "wall", "peak"}, ..., "runs"}}; `cpu` and `wall` seconds a step, `peak` bytes."""
        systems = self.systems(processes, quick and not only)
        systems = {name: system for name, system in systems.items() if not only or name in only}
        results = {name: [] for name in systems}
        for number in range(1 if quick else runs):
            for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
                together, copies = ALONE.get(name, (processes, 1))
                results[name].append(self.run(systems[name], together, copies, steps=4 if quick else 5))
        return {name: summary(parts) for name, parts in results.items()}

    def systems(self, processes: int, quick: bool) -> dict[str, dict]:
        """The systems of a comparison by name, in the order of the table."""
        if processes == 2:
            names = [name for name in TWO if name not in UNFORCED or not self.sizes.get("ends")]
            systems = {name: {**SYSTEMS.get(name, SYSTEMS["megarlhf"])} for name in names}
            for name in names:
                systems[name]["overrides"] = [*systems[name].get("overrides", []), *TWO[name]]
        else:
            systems = {name: SYSTEMS[name] for name in (["trl", "megarlhf"] if quick else SYSTEMS)}
        if self.old:
            old = {"old": {**systems["megarlhf"], "root": str(self.old.resolve())}}
            systems = {"trl": systems["trl"], "megarlhf": systems["megarlhf"]} | old | systems
        return systems

    def run(self, system: dict, processes: int, copies: int, steps: int) -> dict:
        """One run in fresh processes: {phase: {"cpu", "wall"} of the median step, "peak"}, summed over processes. Of
        several `copies` at the same time, each gets its part of the batch."""
        sizes = self.sizes | {"batch": self.sizes["batch"] // copies}
        running = [self._start(system, sizes, processes, steps) for _ in range(copies)]
        for process, out in running:
            if process.wait():
                sys.exit(f"{' '.join(process.args)} failed:\n{Path(f'{out}.log').read_text()[-4000:]}")
        files = [Path(f"{out}.{rank}.json") for _, out in running for rank in range(processes)]
        return medians([json.loads(file.read_text()) for file in files])

    def _start(self, system: dict, sizes: dict, processes: int, steps: int) -> tuple[subprocess.Popen, Path]:
        self.count += 1
        out = self.directory / f"out{self.count}"
        files = {name: str(self.directory / file) for name, file in FILES.items()}
        spec = {**sizes, **system, **files, "out": str(out), "steps": steps}
        if system["system"] == "megarlhf":
            spec |= our_settings(self.directory, sizes, system["overrides"], out, steps, processes)
        path = self.directory / f"spec{self.count}.json"
        path.write_text(json.dumps(spec))
        python = str(self.python) if system["system"] == "trl" else sys.executable
        launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with open(f"{out}.log", "w") as log:
            process = subprocess.Popen(
                [python, *launcher, str(ROOT / "bench" / "ppo_child.py"), str(path)],
                env=environment_of(system, sizes),
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return process, out


def environment_of(system: dict, sizes: dict) -> dict[str, str]:
    if sizes.get("device") == "cuda":
        path = [str(ROOT)]
        if system["system"] == "megarlhf":  # with the packages that this process was given; TRL has its own
            path += filter(None, [os.environ.get("PYTHONPATH")])
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return {**os.environ, **THREADS, "PYTHONPATH": system.get("root", str(ROOT)), "ACCELERATE_USE_CPU": "true"}


def our_settings(directory: Path, sizes: dict, overrides: list[str], out: Path, steps: int, processes: int = 1) -> dict:
    """The part of a child's SPEC for `megarlhf ppo` on the models in `directory`. "micro_batch": (rows, columns)."""
    settings = {
        "run": f"{out}.run",
        "model": {"checkpoint": f"{directory}/policy", "dtype": "bf16" if sizes.get("device") == "cuda" else "fp32"},
        "prompts": {"path": f"{directory}/prompts.jsonl", "length": PROMPT},
        "sampler": {"response_length": sizes["response"], "micro_batch_size": sizes["batch"],
                    "stop_at_eos": bool(sizes.get("ends"))},
        "scoring": {"sources": [{"checkpoint": f"{directory}/reward"}]},
        "training": {"steps": steps, "batch_size": sizes["batch"], "epochs": sizes["epochs"]},
        "optimizer": {"lr": 1e-5},
        "checkpoint": {"every": 1000},
    }  # fmt: skip
    config = Path(f"{out}.yaml")
    config.write_text(json.dumps(settings))  # JSON is YAML
    return {
        "config": str(config),
        "overrides": [part.replace("{models}", str(directory)) for part in overrides],
        "micro_batch": (min(sizes["rows"] * processes, sizes["batch"] // processes), PROMPT + sizes["response"]),
    }


def medians(ranks: list[list[dict]]) -> dict:
    """{phase: {"cpu", "wall", "peak"} of the median step, "peak", "forcing"}: CPU seconds and bytes of all ranks, wall
    seconds of the slowest. The first step warms up, and after the last a checkpoint is written: neither counts."""
    result = {}
    for phase in PHASES:
        counted = [[step[phase] for step in rank[1:-1] if phase in step] for rank in ranks]
        result[phase] = {
            "cpu": sum(statistics.median(step["cpu"] for step in rank) if rank else 0 for rank in counted),
            "wall": max(statistics.median(step["wall"] for step in rank) if rank else 0 for rank in counted),
            "peak": sum(max((step["peak"] for step in rank), default=0) for rank in counted),
        }
    result["peak"] = sum(max(phase["peak"] for step in rank[1:-1] for phase in step.values()) for rank in ranks)
    result["forcing"] = sum(
        statistics.median(sum(phase["forcing"] for phase in step.values()) for step in rank[1:-1]) for rank in ranks
    )
    return result


def models(directory: Path, sizes: dict) -> None:
    """Write a random policy and reward model of transformers, the converted models, and prompts of exactly PROMPT
    words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from megarlhf.convert.convert import hf2megatron

    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *map(str, range(sizes["vocab"] - 3))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        num_hidden_layers=sizes["layers"], hidden_size=sizes["hidden"], intermediate_size=sizes["hidden"] * 11 // 4,
        num_attention_heads=sizes["hidden"] // 32, num_key_value_heads=sizes["hidden"] // 32,
        vocab_size=sizes["vocab"], max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    for role, model in (("policy", LlamaForCausalLM(config)), ("reward", LlamaForSequenceClassification(config))):
        model.save_pretrained(directory / f"hf_{role}")
        tokenizer.save_pretrained(directory / f"hf_{role}")
        hf2megatron(directory / f"hf_{role}", directory / role)
    rows = torch.randint(3, sizes["vocab"], (sizes["batch"] * 8, PROMPT)).tolist()
    (directory / "prompts.json").write_text(json.dumps(rows))
    lines = (json.dumps({"prompt": tokenizer.decode(row)}) for row in rows)
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def summary(runs: list[dict]) -> dict:
    """Medians over runs, with the step's figures of every run for the spread: CPU and wall seconds, bytes."""
    result = {}
    for phase in PHASES:
        result[phase] = {kind: statistics.median(run[phase][kind] for run in runs) for kind in ("cpu", "wall", "peak")}
    totals = [{kind: sum(run[phase][kind] for phase in PHASES) for kind in ("cpu", "wall")} for run in runs]
    result["step"] = {kind: statistics.median(total[kind] for total in totals) for kind in ("cpu", "wall")}
    result["runs"] = {kind: [total[kind] for total in totals] for kind in ("cpu", "wall")}
    result["runs"]["peak"] = [run["peak"] for run in runs]
    for kind in ("peak", "forcing"):
        result[kind] = statistics.median(run[kind] for run in runs)
    return result


def pairs(systems: dict[str, dict]) -> dict[str, dict]:
    """{"system / peer": {"cpu", "wall", "peak": {"median", "min", "max"}}}: ratios of the runs with the same
    number."""
    result = {}
    for mine, name in (("megarlhf", "trl"), ("megarlhf", "old"), ("lora", "megarlhf")):
        if name in systems and mine in systems:
            own, other = systems[mine]["runs"], systems[name]["runs"]
            result[f"{mine} / {name}"] = {
                kind: spread([a / b for a, b in zip(own[kind], other[kind], strict=True)]) for kind in own
            }
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def peer_of(systems: dict[str, dict]) -> str:
    """The system to which the others are compared."""
    return next(name for name in ("trl", "old", *systems) if name in systems)


def report(figures: dict) -> None:
    systems = figures["systems"]
    peer_name = peer_of(systems)
    peer = systems[peer_name]
    processes = f"{figures['processes']} process{'es' if figures['processes'] > 1 else ''}"
    print(f"\n{figures['configuration']}, {processes}: CPU seconds a step (ratio to {peer_name})")
    print(f"{'':10}" + "".join(f"{phase:>18}" for phase in (*PHASES, "step")) + f"{'wall s':>16}{'peak MiB':>18}")
    for name, system in systems.items():
        cells = [(system[phase]["cpu"], peer[phase]["cpu"]) for phase in (*PHASES, "step")]
        line = "".join(f"{own:>10.3f} ({own / max(other, 1e-9):4.2f}x)" for own, other in cells)
        wall = f"{system['step']['wall']:>9.2f} ({system['step']['wall'] / peer['step']['wall']:4.2f}x)"
        print(f"{name:10}{line}{wall}{system['peak'] / 2**20:>10.0f} ({system['peak'] / peer['peak']:4.2f}x)")
    each = (f"{name} {min(one['runs']['cpu']):.2f}-{max(one['runs']['cpu']):.2f}" for name, one in systems.items())
    print("  spread of the step's CPU seconds over runs: " + ", ".join(each), flush=True)
    for name, kinds in figures["pairs"].items():
        each = (f"{kind} {one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" for kind, one in kinds.items())
        print(f"  {name}, run by run: {', '.join(each)}", flush=True)
    if any(one["forcing"] for one in systems.values()):
        each = (f"{name} {one['forcing'] * 1000:.0f}" for name, one in systems.items())
        print(f"  not counted, CPU ms a step that the forcing of the ends took: {', '.join(each)}", flush=True)
    for name in ("megarlhf", "tp2", "apart"):
        if "one" in systems and name in systems:
            one, two = (systems[which]["runs"]["wall"] for which in ("one", name))
            gain = spread([a / b for a, b in zip(one, two, strict=True)])
            print(
                f"  throughput of two processes against one, {name}: {gain['median']:.2f} "
                f"({gain['min']:.2f}-{gain['max']:.2f})",
                flush=True,
            )


def draw(figures: list[dict], path: Path) -> None:
    """Stacked bars of the phases' CPU seconds as shares of the peer's step, one group a configuration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(figures), figsize=(4 * len(figures), 4), sharey=True, squeeze=False)
    for axis, one in zip(axes[0], figures, strict=True):
        names, whole = [name for name in one["systems"] if name not in ALONE], one["systems"][peer_of(one["systems"])]
        below = [0.0] * len(names)
        for phase in PHASES:
            shares = [one["systems"][name][phase]["cpu"] / whole["step"]["cpu"] for name in names]
            axis.bar(names, shares, bottom=below, label=phase)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        for x, top in enumerate(below):
            axis.text(x, top, f"{top:.2f}", ha="center", va="bottom")
        axis.set_title(f"{one['configuration']}\n{one['processes']} process(es)", fontsize=9)
    axes[0][0].set_ylabel(f"CPU seconds a step, {peer_of(figures[0]['systems'])} = 1")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
