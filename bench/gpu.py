"""Everything about a GPU in one run of less than ten minutes, without a network: python -m bench.gpu

    python -m bench.gpu [--quick] [--only STAGE ...] [--site PATH ...] [--trl PYTHON] [--out PREFIX] [--minutes M]

    environment  versions, what megarlhf chooses here, the bandwidth of a copy and the rate of matrix products
    probes       single facts about the installed libraries on which the code relies; a wrong one is an error
    kernels      the row kernels of log-probs and of sampling against the bandwidth of a copy
    decode       a step of the sampler against the time in which its bytes could be copied; kernels that it launches
    train        FLOP/s of updates and of forward passes, on Transformer Engine's layers and on megatron's own
    memory       bytes in use and at the peak of each phase of a step
    ppo          seconds and memory of the phases of a PPO step, beside TRL's
    tests        tests/gpu; it comes last and has the time that is left

Each stage is a process of its own (gpu_stages.py) with a limit of time; another stage's failure does not stop it, and
figures that a stage printed before it failed are kept. PREFIX.json and PREFIX.md (a table) are written after each
stage. The status is 1 if a stage failed.

--site adds packages to a bare machine: a directory for PYTHONPATH, or an archive of one directory, which is unpacked.
--trl names the Python of an environment with TRL. Without a GPU the same stages run on a CPU at sizes that show only
that they work; --quick takes small sizes, and less than a minute there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"environment": 60, "probes": 90, "kernels": 90, "decode": 120, "train": 120, "memory": 60, "ppo": 150,
          "tests": 300}  # seconds of each stage at most  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), metavar="STAGE", help="of them")
    parser.add_argument(
        "--site", nargs="+", type=Path, default=[], metavar="PATH", help="packages: folders or archives"
    )
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="of an environment with TRL")
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="PREFIX", help="of the files (gpu)")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together (9.5)")
    arguments = parser.parse_args()
    for path in [*arguments.site, *([arguments.trl] if arguments.trl else [])]:
        if not path.exists():
            parser.error(f"there is no {path}")
    if not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no directory {arguments.out.absolute().parent}")
    results, end = [], time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as directory:
        path = [str(ROOT), *(str(site) for given in arguments.site for site in unpacked(given, Path(directory)))]
        for stage in (stage for stage in LIMITS if stage in arguments.only):
            limit = min(LIMITS[stage], end - time.monotonic())
            results.append(run(stage, limit, path, arguments, Path(directory)))
            Path(f"{arguments.out}.json").write_text(json.dumps(results, indent=1) + "\n")
            Path(f"{arguments.out}.md").write_text(table(results))
    print(f"\n{arguments.out}.json, {arguments.out}.md")
    return int(any(result["status"] == "failed" for result in results))


def unpacked(path: Path, directory: Path) -> list[Path]:
    """The folder itself, or the folder in an archive."""
    if path.is_dir():
        return [path.resolve()]
    with tarfile.open(path) as archive:
        archive.extractall(directory / path.name, filter="data")
    return sorted(folder for folder in (directory / path.name).iterdir() if folder.is_dir())


def run(stage: str, limit: float, path: list[str], arguments: argparse.Namespace, directory: Path) -> dict:
    """{"stage", "status": ok, failed or skipped, "reason", "seconds", "figures"}"""
    result = {"stage": stage, "status": "skipped", "reason": "", "seconds": 0.0, "figures": []}
    print(f"\n== {stage}", flush=True)
    if reason := missing(stage, arguments, limit, path[1:]):
        return said(result | {"reason": reason})
    given = [str(ROOT), *path[1:], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(given), "PYTHONWARNINGS": "ignore",
                   "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}  # fmt: skip
    if not nvidia():
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started, log = time.monotonic(), directory / f"{stage}.log"
    with open(log, "w") as file, open(f"{log}.errors", "w") as errors:
        process = subprocess.Popen(
            command(stage, arguments, directory), cwd=ROOT, env=environment, stdout=file, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            reason = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes that it has started
            code, reason = process.wait(), f"not done after {limit:.0f} s"
    result["seconds"] = round(time.monotonic() - started, 1)
    text = log.read_text()
    result["figures"] = tested(text) if stage == "tests" else figures(text)
    wrong = [figure["what"] for figure in result["figures"] if "error" in figure]
    if code and not reason and not wrong:
        reason = " ".join(Path(f"{log}.errors").read_text().split())[-400:] or f"status {code}"
    skipped = [figure["skipped"] for figure in result["figures"] if "skipped" in figure]
    result["status"] = "failed" if code or wrong else "skipped" if skipped == ["all"] else "ok"
    return said(result | {"reason": reason or ", ".join(wrong)})


def nvidia() -> bool:
    """Whether there may be a GPU. (Only the stages ask the driver: each in a process of its own.)"""
    return os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def figures(text: str) -> list[dict]:
    """The lines of a stage's output that are JSON objects; a stage that was ended may have begun one."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found += [value] if isinstance(value := json.loads(line), dict) else []
    return found


def missing(stage: str, arguments: argparse.Namespace, limit: float, path: list[str]) -> str:
    """Why a stage cannot run, if so. path: the packages of --site."""
    if limit < 5:
        return f"no time is left of {arguments.minutes:g} minutes"
    if stage == "tests" and not importable("pytest", path):
        return "pytest is not installed, nor in the packages of --site"
    if stage == "ppo" and arguments.trl is None:
        return "TRL is not there (--trl PYTHON names the Python of an environment with trl==1.12.0)"
    return ""


def importable(name: str, path: list[str]) -> bool:
    """Whether the stages, which have `path` in PYTHONPATH, can import a module."""
    here, in_site = importlib.util.find_spec(name), importlib.machinery.PathFinder.find_spec(name, path)
    return here is not None or in_site is not None


def command(stage: str, arguments: argparse.Namespace, directory: Path) -> list[str]:
    python, quick = sys.executable, ["--quick"] if arguments.quick else []
    if stage == "tests":  # short ones first
        files = ("engine", "attention", "sampler", "kernels")
        return [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=line",
                *(f"tests/gpu/test_{name}_gpu.py" for name in files)]  # fmt: skip
    if stage == "ppo":
        return [python, "-m", "bench.ppo_step", "--gpu", "--trl", str(arguments.trl), *quick]
    return [python, "-m", "bench.gpu_stages", stage, *quick]


def tested(text: str) -> list[dict]:
    """The results of pytest, also of one that was ended: a figure a test that failed, and how many passed."""
    found = re.findall(r"^(tests/\S+) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?", text, re.M)
    number = {kind: sum(one == kind for _, one, _ in found) for kind in ("PASSED", "SKIPPED")}
    wrong = [{"what": name, "error": kind.lower()} for name, kind, _ in found if kind in ("FAILED", "ERROR")]
    figures = [{"what": "tests passed", "value": number["PASSED"], "unit": f"of {len(found)}"}, *wrong]
    if found and number["SKIPPED"] == len(found):
        reasons = sorted({reason for _, _, reason in found})
        figures = [{"what": f"tests/gpu: {'; '.join(filter(None, reasons)) or 'no GPU'}", "skipped": "all"}]
    return figures


def said(result: dict) -> dict:
    for figure in result["figures"]:
        print("  " + "  ".join(cells(figure)), flush=True)
    print(f"  {result['status']} after {result['seconds']} s" + (f": {result['reason']}" if result["reason"] else ""))
    return result


def cells(figure: dict) -> tuple[str, str, str]:
    """(what, figure, compared with)"""
    value = figure.get("value", "")
    value = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    number = f"{value} {figure.get('unit', '')}".strip()
    against = f"{figure['share']:.2f} of {figure['of']}" if "share" in figure else ""
    return figure["what"], figure.get("error", figure.get("skipped", number)), against


def table(results: list[dict]) -> str:
    lines = ["| stage | what | figure | compared with |", "|---|---|---|---|"]
    for result in results:
        state = f"{result['status']}, {result['seconds']} s" + (f": {result['reason']}" if result["reason"] else "")
        rows = [(f"**{result['stage']}**", state, "", ""), *(("", *cells(figure)) for figure in result["figures"])]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
