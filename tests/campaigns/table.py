"""The bad inputs of the campaign (mistakes.py), by area."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megarlhf.train.rl_config import run_config
from tests.campaigns.configurations import BOMB, CONFIGS, LAYOUTS, OVERRIDES
from tests.campaigns.mistakes import Case, World, command, launched

# ------------------------------------------------------------------------------------------------ data

ROW = {"prompt": "a", "response": "b"}
FORMATS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "data.jsonl"),
    "blank lines": (b"\n\n\n", "data.jsonl"),
    "a JSON array": (json.dumps([ROW] * 3).encode(), "JSON array"),
    "a JSON array, indented": (json.dumps([ROW] * 3, indent=1).encode(), "JSON array"),
    "objects over several lines": (json.dumps(ROW, indent=1).encode(), "over several lines"),
    "gzip": (gzip.compress(json.dumps(ROW).encode())[:-5], "damaged gzip"),
    "Parquet": (b"PAR1" + bytes(500), "Parquet"),
    "Arrow": (b"ARROW1\0\0" + bytes(500), "Arrow"),
    "zip": (b"PK\x03\x04" + bytes(500), "zip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(500), "zstd"),
    "UTF-16": (json.dumps(ROW).encode("utf-16"), "UTF-16"),
    "CSV": (b"prompt,response\na,b\n", "data.jsonl:1: not JSON"),
    "Latin-1": ('{"prompt": "caf\xe9", "response": "a"}\n'.encode("latin-1"), "data.jsonl:1: not UTF-8"),
    "null characters": (bytes(1000), "data.jsonl:1"),
    "a line without end": (b"[" * 2**20, "data.jsonl"),
    "deep JSON": (b'{"prompt": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
    "half an object": (b'{"prompt": "a", "resp', "data.jsonl:1: not JSON"),
}  # fmt: skip
BAD_ROWS: dict[str, dict[str, tuple[Any, str]]] = {
    "sft": {
        "a list": (["a"], "must be a JSON object"), "a string": ("a", "must be a JSON object"), "a number": (3,
        "a JSON object"),
        "null": (None, "a JSON object"), "no keys": ({}, "none of the keys"), "other keys": ({"q": 1, "a": 2},
        "none of the keys"),
        "no response": ({"prompt": "a"}, "no key 'response'"), "no prompt": ({"response": "a"}, "no key 'prompt'"),
        "a null response": ({"prompt": "a", "response": None}, "'response' must be a string"),
        "a number as prompt": ({"prompt": 3, "response": "a"}, "'prompt' must be a string"),
        "an empty response": ({"prompt": "a", "response": " "}, "'response' is empty"),
        "empty text": ({"text": ""}, "'text' is empty"),
        "half a surrogate pair": ({"text": "\ud800"}, "surrogate"), "text that is a list": ({"text": ["a"]},
        "'text' must be a string"),
        "messages that are text": ({"messages": "a"}, "'messages' must be a list"),
        "no messages": ({"messages": []}, "'messages' must be"),
        "a message that is text": ({"messages": ["a"]}, "message 1"),
        "a message without content": ({"messages": [{"role": "user"}]}, "message 1"),
        "no chat template": ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant",
        "content": "b"}]}, "chat template"),
    },
    "reward": {
        "no rejected": ({"prompt": "a", "chosen": "b"}, "no key 'rejected'"), "no prompt": ({"chosen": "a",
        "rejected": "b"}, "no key 'prompt'"),
        "an empty response": ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        "a number": ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' must be a string"),
        "an unknown role": ({"prompt": "a", "chosen": [{"role": "bot", "content": "a"}], "rejected": "b"}, "'bot'"),
        "HH without answers": ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, "share no beginning"),
        "conversations of two prompts": ({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content":
        "b"}], "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "b"}]}, "beginnings"),
        "a negative margin": ({"prompt": "a", "chosen": "c", "rejected": "b", "margin": -1}, "'margin'"),
        "a margin in words": ({"prompt": "a", "chosen": "c", "rejected": "b", "margin": "1"}, "'margin'"),
        "too many responses": ({"prompt": "a", "responses": ["a", "b", "c"], "label": 0}, "'responses'"),
        "a label beyond": ({"prompt": "a", "responses": ["a", "b"], "label": 2}, "'label'"),
        "no label": ({"prompt": "a", "responses": ["a", "b"]}, "'label'"),
        "ranks without a best": ({"prompt": "a", "responses": ["a", "b"], "ranks": [1, 1]}, "'ranks'"),
        "ranks in words": ({"prompt": "a", "responses": ["a", "b"], "ranks": "01"}, "'ranks'"),
    },
    "ppo": {
        "no prompt": ({"text": "a"}, "no key 'prompt'"), "an empty prompt": ({"prompt": ""}, "'prompt' is empty"),
        "a number": ({"prompt": 3}, "'prompt' must be a string"), "messages": ({"messages": [{"role": "user",
        "content": "a"}]}, "chat template"), "the assistant last": ({"prompt": [{"role": "assistant", "content": "a"}]},
        "ends with the assistant"), "no messages": ({"messages": []}, "'messages' must be"),
        "a role of another format": ({"prompt": [{"role": "gpt", "content": "a"}]}, "unknown role 'gpt'"),
        "a list": (["a"], "a JSON object"), "half a surrogate pair": ({"prompt": "\udfff"}, "surrogate"),
        "a record too large": ({"prompt": "a", "tests": "x" * 2**24}, "data.jsonl:1: the keys beside 'prompt' take"),
        "NaN in the record": ({"prompt": "a", "answer": float("nan")}, "data.jsonl:1: a number is NaN"),
    },
}  # fmt: skip
ANSWERS = {  # of a reward function for one response of three characters
    "out of order": "[[(2, 1.0), (1, 1.0)]]", "one end twice": "[[(1, 1.0), (1, 1.0)]]",
    "beyond the text": "[[(4, 1.0)]]", "before the text": "[[(0, 1.0)]]",
    "no number": "[[(1, None)]]", "not finite": "[[(1, float('inf'))]]",
    "no pairs": "[[1.0]]", "a broken end": "[[(1.5, 1.0)]]", "too many": "[1.0, 2.0]", "text": "['1.0']",
    "an error": "1 / 0", "a missing key": "[records[0]['result']]", "a huge number": "[10**5000]",
}  # fmt: skip
KEYS = {"sft": "data.train", "reward": "data.train", "ppo": "prompts.path"}
STRICT = {"sft": ["data.max_bad_fraction=0"], "reward": ["data.max_bad_fraction=0"], "ppo": []}

# ------------------------------------------------------------------------------------ tokenizers, checkpoints


def put(name: str, content: str | bytes) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def all_of(*damages: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda directory: [damage(directory) for damage in damages]


def change(name: str, old: str, new: str) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text, (name, old)
        (directory / name).write_text(text.replace(old, new))

    return damage


def remove(pattern: str) -> Callable[[Path], Any]:
    return lambda directory: max(directory.glob(pattern), key=lambda file: file.stat().st_size).unlink()


def cut(pattern: str, share: float) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        path = max(directory.glob(pattern), key=lambda file: file.stat().st_size)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return damage


def flip(pattern: str) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        path = max(directory.glob(pattern), key=lambda file: file.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return damage


TOKENIZERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an empty directory": (lambda directory: None, "no tokenizer in this directory"),
    "garbage as a model": (put("a.model", b"garbage"), "tokenizer"),
    "an empty model": (put("a.model", b""), "tokenizer"),
    "two models": (all_of(put("a.model", b"a"), put("b.model", b"b")), "2 .model files"),
    "a pipe as a model": (lambda directory: os.mkfifo(directory / "a.model"), "no tokenizer"),
    "JSON that is none": (put("tokenizer.json", "{"), "tokenizer"),
    "JSON of another kind": (put("tokenizer.json", "[]"), "tokenizer"),
    "an empty tokenizer.json": (put("tokenizer.json", ""), "tokenizer"),
    "no vocabulary": (put("tokenizer.json", "{}"), "tokenizer"),
    "a configuration alone": (put("tokenizer_config.json", "{}"), "tokenizer"),
    "a list as configuration": (put("tokenizer_config.json", "[]"), "tokenizer"),
    "a vocabulary that is none": (put("vocab.json", "3"), "tokenizer"),
    "deep JSON": (put("tokenizer.json", "[" * 100_000), "tokenizer"),
    "a class that needs code": (
        put("tokenizer_config.json", '{"tokenizer_class": "M", "auto_map": {"AutoTokenizer": ["m.M", null]}}'),
        "tokenizer",
    ),
}  # fmt: skip
CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut in half": (cut("actor/*.distcp", 0.5), "damaged"),
    "a byte too few": (cut("actor/*.distcp", 0.99), "damaged"),
    "an empty weight file": (cut("actor/*.distcp", 0), "damaged"),
    "a flipped bit in a small file": (flip("actor/common.pt"), "common.pt"),  # a large one is read when it is loaded
    "a weight file missing": (remove("actor/*.distcp"), "is missing"),
    "no .metadata": (remove("actor/.metadata"), "actor"),
    "an empty .metadata": (cut("actor/.metadata", 0), ".metadata"),
    "half of .metadata": (cut("actor/.metadata", 0.5), ".metadata"),
    "garbage as .metadata": (put("actor/.metadata", b"garbage"), ".metadata"),
    "no architecture": (remove("actor/architecture.yaml"), "model"),
    "an empty architecture": (put("actor/architecture.yaml", ""), "architecture.yaml"),
    "an architecture that is a list": (put("actor/architecture.yaml", "- 1"), "architecture.yaml"),
    "an architecture that is no YAML": (put("actor/architecture.yaml", "a: ["), "architecture.yaml"),
    "an architecture not in UTF-8": (put("actor/architecture.yaml", b"\xff"), "architecture.yaml"),
    "an architecture in words": (change("actor/architecture.yaml", "num_layers: 2", "num_layers: two"), "num_layers"),
    "other layers": (change("actor/architecture.yaml", "num_layers: 2", "num_layers: 3"), "architecture.yaml"),
    "another MLP": (change("actor/architecture.yaml", "ffn_hidden_size: 64", "ffn_hidden_size: 96"), "linear_fc1"),
    "another vocabulary": (change("actor/architecture.yaml", "vocab_size: 300", "vocab_size: 3000"),
    "word_embeddings"),
    "a bias more": (change("actor/architecture.yaml", "qkv_bias: false", "qkv_bias: true"), "bias"),
    "an unknown key": (change("actor/architecture.yaml", "family", "famly"), "famly"),
    "rotary_percent 3": (change("actor/architecture.yaml", "rotary_percent: 1.0", "rotary_percent: 3.0"),
    "rotary_percent"),
    "a negative epsilon": (change("actor/architecture.yaml", "norm_epsilon: 1.0e-05", "norm_epsilon: -1.0"),
    "norm_epsilon"),
    "an empty directory": (lambda directory: shutil.rmtree(directory / "actor"), "model"),
    "no tokenizer": (lambda directory: shutil.rmtree(directory / "tokenizer"), "tokenizer"),
    "a Hugging Face model": (
        all_of(lambda directory: shutil.rmtree(directory / "actor"), put("config.json", "{}")),
        "hf2megatron",
    ),
}  # fmt: skip
RESUMES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "latest names nothing": (put("checkpoints/latest", "step_00000099"), "latest"),
    "an empty latest": (put("checkpoints/latest", ""), "latest"),
    "latest not in UTF-8": (put("checkpoints/latest", b"\xff\xfe"), "latest"),
    "latest leads elsewhere": (put("checkpoints/latest", "../../../etc"), "latest"),
    "a state that is no JSON": (put("checkpoints/step_00000008/state.json", "{"), "state.json"),
    "an empty state": (put("checkpoints/step_00000008/state.json", ""), "state.json"),
    "a state that is a list": (put("checkpoints/step_00000008/state.json", "[]"), "state.json"),
    "a state without a step": (put("checkpoints/step_00000008/state.json", "{}"), "state.json"),
    "a run.yaml that is no YAML": (put("checkpoints/step_00000008/run.yaml", "a: ["), "run.yaml"),
    "a run.yaml not in UTF-8": (put("checkpoints/step_00000008/run.yaml", b"\xff"), "run.yaml"),
    "another architecture": (
        change("checkpoints/step_00000008/actor/architecture.yaml", "ffn_hidden_size: 64", "ffn_hidden_size: 96"),
        "architecture",
    ),
    "weights cut in half": (cut("checkpoints/step_00000008/actor/*.distcp", 0.5), "damaged"),
}  # fmt: skip
RUN_DIRECTORIES = {
    "/proc/x": "/proc/x", "/etc/passwd": "/etc/passwd", "/dev/null": "/dev/null", "{d}/rules.py": "rules.py",
    "{d}/" + "x" * 300: "run", "''": "run", "{d}/pipe": "pipe",
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ launches, reports

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER}
SRUN = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node2",
}  # fmt: skip
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in
            {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}  # fmt: skip


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


LAUNCHES: list[tuple[str, dict[str, str], str]] = [
    *((f"torchrun without {name}", without(TORCHRUN, name), name) for name in TORCHRUN),
    *((f"Open MPI without {name}", without(OPEN_MPI, name), name)
      for name in OPEN_MPI if not name.endswith("WORLD_RANK")),
    *((f"srun without {name}", without(SRUN, name), name)
      for name in SRUN if name not in ("SLURM_STEP_ID",)),
    *((f"{name}={value}", TORCHRUN | {name: value}, name)
      for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT") for value in ("", "x",
      "-1")),
    ("rank 4 of 4", TORCHRUN | {"RANK": "4"}, "RANK=4"),
    ("local rank 2 of 2", TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
    ("8 local ranks of 4", TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8"),
    ("port 0", TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ("port 99999", TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ("an empty address", TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
    ("RANK once for all tasks", SRUN | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, "contradicts SLURM_PROCID"),
    ("a job of 8 tasks without srun", {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8"}, "8 tasks"),
    ("a job of 2 nodes without srun", {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2"}, "2 tasks"),
    ("a job of 8 tasks a node without srun", {"SLURM_JOB_ID": "42", "SLURM_NTASKS_PER_NODE": "8"}, "8 tasks"),
    ("a job of 8 GPUs without srun", {"SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "8"}, "8 GPUs"),
    ("SLURM_PROCID of 8 without srun", {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "8 tasks"),
    ("SLURM_PROCID 3 without a step", {"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
    ("tasks a node in words", SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE"),
    ("a node too many", SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
    ("a node list that is none", SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, "node[1-"),
    ("mpich without a local rank", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID"),
]  # fmt: skip
STARTED: list[tuple[str, list[str], dict[str, str], str]] = [
    ("RANK alone", [], {"RANK": "0"}, "WORLD_SIZE"),
    ("an address that is none", [], TORCHRUN | {"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR"),
    ("a rank's mistake in the configuration", ["seed=-1"], TORCHRUN, "seed"),
]
AUDIT_ROW = dict.fromkeys(("detail", "what", "value", "original"), "x")
REPORTS: dict[str, dict[str, bytes]] = {
    "run.yaml": {
        "empty": b"", "no YAML": b"a: [", "a list": b"- 1", "not UTF-8": b"\xff\xfe", "a bad tag": b"a: !!int x",
        "an anchor in itself": b"a: &a [*a]", "a date that is none": b"a: 2024-99-99", "aliases without end": BOMB,
    },
    "metrics.jsonl": {
        "not UTF-8": b"\xff\n{}\n", "lists": b"[1]\n", "no step": b'{"loss": 1}\n',
        "a step that is true": b'{"step": true}\n',
        "a negative step": b'{"step": -1}\n', "a huge step": b'{"step": 1' + b"0" * 40 + b"}\n",
        "deep": b"[" * 100_000 + b"\n",
        "null characters": bytes(100) + b"\n", "gzip": gzip.compress(b"{}") + b"\n\n",
    },
    "audit.json": {
        "empty": b"", "cut": b"[{", "an object": b'{"a": 1}', "numbers": b"[1]", "not UTF-8": b"\xff",
        "deep": b"[" * 100_000,
        "a row without value": b'[{"detail": "a"}]',
        "a number as value": json.dumps([AUDIT_ROW | {"value": 3}]).encode(),
    },
    "work.json": {
        "empty": b"", "a list": b"[]", "no phases": b'{"matmul": 1}', "matmul 0": b'{"matmul": 0, "phases": {}}',
        "matmul in words": b'{"matmul": "x", "phases": {}}',
        "phases that are numbers": b'{"matmul": 1, "phases": {"learn": 1}}',
        "no bytes": b'{"matmul": 1, "phases": {"learn": {"flops": 1}}}',
        "infinite": b'{"matmul": Infinity, "phases": {}}',
    },
}  # fmt: skip
COMMANDS: dict[str, tuple[list[str], str]] = {
    "an unknown program": (["pppo"], "pppo"),
    "no configuration": (["sft"], "--config"),
    "a configuration that is not there": (["preflight", "--config", "/no/such.yaml"], "/no/such.yaml"),
    "a directory as configuration": (["preflight", "--config", "/"], "/: cannot read"),
    "a device as configuration": (["preflight", "--config", "/dev/zero"], "/dev/zero"),
    "a name of 300 letters": (["preflight", "--config", "x" * 300], "File name too long"),
    "nodes in words": (["preflight", "--config", "a", "--nodes", "two"], "--nodes"),
    "a report of nothing": (["report", "/no/such"], "/no/such"),
    "a report of a file": (["report", "/etc/passwd"], "/etc/passwd"),
    "generate without anything": (["generate"], "is missing"),
}


def leaves(cls: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a configuration that are no section."""
    for name, kind in typing.get_type_hints(cls).items():
        section = next((part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)), None)
        if section is None or typing.get_origin(kind) is tuple:
            yield f"{prefix}{name}"
        else:
            yield from leaves(section, f"{prefix}{name}.")


def split(overrides: str) -> list[str]:
    """At spaces in front of a further key or flag."""
    out: list[str] = []
    for word in overrides.split(" "):
        plain = not out or word.startswith("--") or ("=" in word and word.split("=")[0].replace(".", "").isidentifier())
        out = [*out, word] if plain else [*out[:-1], f"{out[-1]} {word}"]
    return out


def of_program(world: World, program: str, overrides: str) -> tuple[int, str]:
    return world.program(program, *split(overrides))


def table() -> Iterator[Case]:
    for name, (content, place) in CONFIGS.items():
        yield Case("config", name, partial(World.text, content=content), place)
    for program, given in (("ppo", "sft"), ("sft", "ppo"), ("reward", "ppo")):
        yield Case(
            "config", f"a configuration of {given} given to {program}",
            lambda world, program=program, given=given: world.program(program, config=world.write(given)),
            f"the file looks like a configuration for 'megarlhf {given}'",
        )  # fmt: skip
    for program, overrides in OVERRIDES.items():
        for override, place in overrides.items():
            attempt = partial(of_program, program=program, overrides=override)
            yield Case("overrides", f"{program} {override.replace('{{', '{').replace('}}', '}')}", attempt, place)
    for key in leaves(run_config("ppo")):
        if not key.startswith(("model.architecture", "scoring.sources")) and key != "preset":
            yield Case(
                "overrides",
                f"a section as {key}",
                partial(of_program, program="ppo", overrides=f"{key}={{{{a: 1}}}}"),
                key,
            )
    for override, place in LAYOUTS.items():
        yield Case("layout", override, partial(of_program, program="sft", overrides=override), place)
    for name, (content, place) in FORMATS.items():
        yield Case("data", f"sft: {name}", partial(World.data, program="sft", key="data.train", content=content), place)
    for name in ("empty", "a JSON array", "gzip", "CSV"):
        content, place = FORMATS[name]
        for program in ("reward", "ppo"):
            attempt = partial(World.data, program=program, key=KEYS[program], content=content)
            yield Case("data", f"{program}: {name}", attempt, place)
    for program, rows in BAD_ROWS.items():
        for name, (row, place) in rows.items():
            yield Case("data", f"{program}: a line with {name}", partial(bad_row, program=program, row=row), place)
    for name, said in ANSWERS.items():
        yield Case("answers", name, partial(World.answers, said=said), "judge.py:score")
    for name, (damage, place) in TOKENIZERS.items():
        yield Case("tokenizer", name, partial(World.tokenizer, damage=damage), place)
    for path in ("/no/such", "/dev/null", "/dev/zero", "{d}/pipe", "{d}/rules.py", "''", "3"):
        yield Case("tokenizer", path, partial(of_program, program="sft", overrides=f"tokenizer={path}"), "tokenizer")
    for name, (damage, place) in CHECKPOINTS.items():
        yield Case("checkpoint", name, partial(World.checkpoint, damage=damage), place)
    for name, (damage, place) in RESUMES.items():
        yield Case("checkpoint", f"resume: {name}", partial(World.resume, damage=damage), place)
    for path, place in RUN_DIRECTORIES.items():
        yield Case("checkpoint", f"run={path}", partial(of_program, program="sft", overrides=f"run={path}"), place)
    for name, environment, place in LAUNCHES:
        yield Case("launch", name, lambda _, environment=environment: launched(environment), place)
    for name, arguments, environment, place in STARTED:
        yield Case(
            "launch", f"a process with {name}",
            lambda world, arguments=arguments, environment=environment: world.started(*arguments, **environment),
            place, seconds=120,  # imports take most of it
        )  # fmt: skip
    for file, contents in REPORTS.items():
        for name, content in contents.items():
            yield Case("report", f"{file}: {name}", partial(World.report, damage=put(file, content)), file)
    for file in ("run.yaml", "metrics.jsonl"):
        yield Case("report", f"no {file}", partial(World.report, damage=remove(file)), file)
    for name, (arguments, place) in COMMANDS.items():
        yield Case("command line", name, lambda _, arguments=arguments: command(*arguments), place)


def bad_row(world: World, program: str, row: Any) -> tuple[int, str]:
    return world.data(program, KEYS[program], [row], *STRICT[program])


CASES = list(table())
