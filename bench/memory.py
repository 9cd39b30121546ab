"""Bytes that a rank's device holds in each phase of a PPO step, without and with each switch that keeps something in
host memory, and of a policy that trains its top layer alone: `python -m bench.memory`.

They are counted (cluster/residency.py): weights, gradients, optimizer state and caches, not activations. On a CPU the
device is counted as if it were separate; on a GPU the allocator's peak, with activations, is shown too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.one_rank import start
from bench.ppo_step import models, our_settings

SWITCHES = {
    "none": [],
    "optimizer.state_on_host": ["optimizer.state_on_host=true"],
    "critic.on_host": ["critic.on_host=true"],
    "reference.on_host": ["reference.on_host=true"],
    "scoring.on_host": ["scoring.on_host=true"],
}
SWITCHES["all"] = [override for overrides in SWITCHES.values() for override in overrides]
TOP = {  # models that train a part of their layers
    "trained_layers: 1": ["model.trained_layers=1"],
    "and a hydra reference": ["model.trained_layers=1", "reference.kind=hydra"],
    "and all of the above": ["model.trained_layers=1", "reference.kind=hydra", *SWITCHES["all"]],
}
PHASES = ("sample", "score", "evaluate", "learn", "save")
KINDS = ("weights", "gradients", "optimizer", "caches")
SIZES = dict(layers=4, hidden=256, vocab=32000, batch=32, response=24, epochs=1, rows=32)


def held(path: Path, overrides: list[str], topology) -> dict[str, dict]:
    """{phase: {kind: bytes, "total", "allocator"}} of two steps: the fullest moment of each phase."""
    from megarlhf.checkpoint import CheckpointConfig, Checkpoints
    from megarlhf.cluster import residency
    from megarlhf.log import Log
    from megarlhf.train import online, rl

    settings = rl.PPO.load(str(path), overrides)
    plan = rl.PPO.check(settings, 1)
    models, progress = rl.assemble(settings, settings.value, plan, topology)
    run = Path(settings.run)
    run.mkdir(exist_ok=True)  # the tokenized data are there
    with residency.watched(models.counted) as watch, Log(run, enabled=False, start=0, total=2, unit="step") as log:
        online.train(
            settings.value, models, progress, settings=settings, checkpoints=Checkpoints(run, CheckpointConfig()),
            log=log, write_files=lambda directory: None,
        )  # fmt: skip
    return {
        phase: watch.kinds(phase)
        | {"total": sum(watch.peaks[phase].values()), "allocator": watch.measured.get(phase, 0)}
        for phase in PHASES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="figures as JSON")
    parser.add_argument("--only", action="append", choices=[*SWITCHES, *TOP], help="this switch; may be repeated")
    arguments = parser.parse_args()
    topology, figures = start(), {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        models(folder, SIZES)
        spec = our_settings(folder, SIZES, [], folder / "memory", steps=2)
        for name, overrides in (SWITCHES | TOP).items():
            if arguments.only and name not in arguments.only:
                continue
            own = [f"critic.checkpoint={folder}/reward", f"run={folder}/{len(figures)}"]
            figures[name] = held(Path(spec["config"]), ["model.dtype=bf16", *own, *overrides], topology)
    print(f"MB in each phase; {json.dumps(SIZES)}, bf16, one rank")
    print(f"{'switch':<26}{'phase':<10}" + "".join(f"{kind:>11}" for kind in (*KINDS, "total", "allocator")))
    for name, phases in figures.items():
        for phase, sizes in phases.items():
            row = "".join(f"{sizes[kind] / 1e6:>11.1f}" for kind in (*KINDS, "total", "allocator"))
            print(f"{name:<26}{phase:<10}{row}")
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
