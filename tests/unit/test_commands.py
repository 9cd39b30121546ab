"""Every command of README.md and docs/: a test runs it, or the table says why none does. Besides, each is one that the
command line takes, and its keys exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from megarlhf import cli, config
from megarlhf.config import UserError
from megarlhf.convert import __main__ as converter
from tests.ranks import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The first words of commands. A block whose language is sh has commands alone; in others, lines that begin otherwise
# are data or what a program prints.
FIRST = {
    "make", "megarlhf", "srun", "python", "python3", "mpirun", "torchrun", "sbatch", "bash", "exec", "squeue", "tail",
    "scontrol", "cat", "export", "echo", "pip", "git", "curl",
}  # fmt: skip
BENCH = "a benchmark, whose result is a figure: who changes a kernel or a loop runs it"
# pattern of the whole command: the test that runs that program with these options, or the reason why none does
COMMANDS = {
    # Set-up
    r"make demo": "not run: .ci/run is a run of its own; tests/e2e/test_configs.py runs the demo's configurations",
    r"make test": "not run: it runs the tests",
    r"make venv": "not run: `make test` begins with it",
    r"pip install .*": "not run: it needs a network; tests/convert/test_wheel.py::test_it_converts_there_and_back",
    r"make gpu.*": "not run: it needs a GPU; tests/unit/test_bench_gpu.py::test_the_probes_hold_on_a_cpu",
    r"python bench/kernels.py|python -m bench\..*": f"not run: {BENCH}",
    r"torchrun .* -m bench\..*": f"not run: {BENCH}",
    r"python examples/demo.py.*": "not run: minutes; tests/e2e/test_configs.py::test_an_example",
    r"python -m tools.documents": "tests/unit/test_describe.py::test_documents_are_current",
    r"python -m tests.campaigns.config_edits.*": "tests/convert/test_config_edits.py",
    r"python -m tests.campaigns.convert_faults.*": "tests/convert/test_guards.py",
    # Describing
    r"megarlhf (init|schema) \w+": "tests/unit/test_describe.py::test_every_form_of_every_program",
    r"megarlhf report .*": "tests/unit/test_report.py::test_the_command_writes_the_page",
    r"megarlhf preflight .*": "tests/unit/test_preflight.py::test_a_good_configuration",
    r"megarlhf plan .* --search": "tests/unit/test_plan_search.py::test_the_command",
    r"megarlhf plan (?!.*--search).*": "tests/unit/test_plan.py::test_a_plan_on_this_machine",
    # The quick start, as it stands
    r"megarlhf sft --config sft.yaml.*": "tests/e2e/test_quickstart.py",
    r"torchrun --nproc-per-node 2 -m megarlhf sft .*": "tests/e2e/test_quickstart.py",
    r"megarlhf rl --config rl.yaml": "tests/e2e/test_quickstart.py",
    r"megarlhf generate --checkpoint runs/rl/best .*": "tests/e2e/test_quickstart.py",
    r"megarlhf convert (hf2megatron|verify|megatron2hf) .*": "tests/e2e/test_quickstart.py",
    # Converting
    r"megarlhf convert COMMAND SOURCE TARGET .*": "not run: the form of all the others",
    r"megarlhf convert (peft2megatron|megatron2peft) .*": "tests/convert/test_adapters.py::test_there_and_back",
    r"megarlhf convert nemo2megatron .*": "tests/convert/test_nemo_to_ppo.py::test_nemo_to_ppo_to_transformers",
    r"megarlhf convert megatron2megatron .*": "tests/convert/test_sources.py",
    r"mpirun -n 8 megarlhf convert .*": "tests/convert/test_certificate.py",
    # Programs under srun: tests/slurm/test_jobs.py starts sft, reward and ppo so; the others are started by what starts
    # those, and the tests named start them on ranks.
    r"srun python -m megarlhf (sft|reward|ppo) .*": "tests/slurm/test_jobs.py::test_job",
    r"srun python -m megarlhf rl .*": "tests/e2e/test_rl.py",
    r"srun python -m megarlhf (dpo|kto) .*": "tests/e2e/test_preferences.py",
    r"srun python -m megarlhf prm .*": "tests/e2e/test_process_reward.py",
    r"srun python -m megarlhf ilql .*": "tests/e2e/test_ilql.py",
    r"srun python -m megarlhf generate .*q_beta.*": "tests/e2e/test_ilql.py::test_generate",
    r"python -m megarlhf generate .*": "tests/e2e/test_evaluation.py::test_the_best_step_stays",
    r"srun python -m megarlhf score .*": "tests/distributed/test_score.py",
    r"megarlhf select --input .*": "tests/unit/test_select.py::test_the_best",
    r"megarlhf select --kind ask .*": "tests/unit/test_select.py::test_asking",
    r"megarlhf rounds .*": "tests/e2e/test_rounds.py::test_what_a_chain_writes",
    r"megarlhf serve-reward .*": "tests/distributed/test_scoring.py",
    r"torchrun --nnodes 2 .*": "not run: it needs two machines; tests/slurm/test_jobs.py has two nodes under srun",
    # Slurm
    r"export SBATCH_ACCOUNT=.*|export CONTAINER_IMAGE=.*": "not run: names of a site",
    r"sbatch .*_7b.sh.*": "tests/slurm/test_jobs.py::test_job",
    r"bash examples/slurm/(pipeline|rounds)_7b.sh .*": "tests/slurm/test_jobs.py::test_job",
    r"exec bash examples/slurm/run.sh .*": "tests/unit/test_slurm.py",
    r"sbatch --time=10 .*|squeue --me|scontrol .*": "not run: Slurm's own; tests/slurm/test_jobs.py has what follows",
    r"(tail|cat) .*": "not run: shows a file",
    r"export MEGARLHF_SECRET=.*": "tests/unit/test_channel.py",
}


def commands(page: Path) -> list[tuple[str, str]]:
    """(place, command) of a page: of fenced and indented blocks, and inline code with arguments."""
    found, fence, joined = [], None, ""
    made = page.name == "configuration.md"  # from docstrings, which are indented
    for number, line in enumerate(page.read_text().splitlines(), 1):
        place = f"{page.name}:{number}"
        if line.startswith("```"):
            fence = None if fence is not None else line[3:]
        elif fence == "sh" or (fence is None and line.startswith("    ") and not made):
            joined += line.strip().removesuffix("\\")
            if not line.endswith("\\"):
                text, joined = bare(joined), ""
                if text and (fence == "sh" or text.split()[0] in FIRST):
                    found.append((place, text))
        elif fence is None:
            spans = re.findall(r"`([^`]+)`", line)
            found += [(place, bare(span)) for span in spans if len(span.split()) > 1 and span.split()[0] in FIRST]
    return [(place, command) for place, command in found if not is_mention(command)]


def bare(line: str) -> str:
    """Without the comment behind it."""
    return re.sub(r"\s+# .*", "", line).strip()


def is_mention(command: str) -> bool:
    """`megarlhf sft`, `megarlhf convert`: the name of a program; `megarlhf [rank 0 on ...`: a message."""
    words = command.split()
    return (words[0] == "megarlhf" and (len(words) == 2 or words[1] in ("PROGRAM", "[rank"))) or words[-1] == "RUN"


FOUND = [entry for page in PAGES for entry in commands(page)]


def test_each_has_a_test_or_a_reason():
    wrong = []
    for place, command in FOUND:
        known = [pattern for pattern in COMMANDS if re.fullmatch(pattern, command)]
        if len(known) != 1:
            wrong.append(f"{place}: {command}: {len(known)} entries of COMMANDS")
    assert len(FOUND) > 60 and not wrong, "\n".join(wrong)


def test_the_table_has_nothing_else():
    used = {pattern for pattern in COMMANDS for _, command in FOUND if re.fullmatch(pattern, command)}
    assert not COMMANDS.keys() - used


def test_the_tests_exist():
    for said in COMMANDS.values():
        for name in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", said):
            path, _, function = name.partition("::")
            assert f"def {function}" in (ROOT / path).read_text(), name
        assert said.startswith(("tests/", "not run: ")), said


@pytest.mark.parametrize(("place", "command"), FOUND, ids=[f"{place} {command[:40]}" for place, command in FOUND])
def test_the_command_line_takes_it(place, command):
    """The program, its options, and the keys behind them."""
    words = shlex.split(command)
    at = next((i for i, word in enumerate(words) if word == "megarlhf"), None)
    if at is None or "COMMAND" in words or "bench." in command:
        return
    arguments = [word for word in words[at + 1 :] if word != "[options]"]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            if arguments[0] == "convert":
                converter.parser().parse_args(arguments[1:])
                return
            given = cli.parser().parse_args(arguments)
    except SystemExit:
        raise AssertionError(f"{place}: {said.getvalue()}")
    overrides = [text for text in getattr(given, "overrides", []) if text != "data.train=..."]
    if not overrides:
        return
    names = [given.program]
    if given.program in ("preflight", "plan"):  # of a configuration of any program that trains
        names = [given.subject] if given.subject else cli.TRAINING
    classes = [cls for name in names for cls in cli.find(name).configurations]
    for text in overrides:
        assert any(takes(cls, text) for cls in classes), f"{place}: {text}"


def takes(cls: type, override: str) -> bool:
    """Whether the key is one of the class: nothing else of the configuration is given."""
    try:
        config.load(cls, None, [override])
    except UserError as error:
        return "unknown key" not in str(error)
    return True
