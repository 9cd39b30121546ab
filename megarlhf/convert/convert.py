"""hf2megatron, nemo2megatron, megatron2megatron, megatron2hf and verify: read a step's inputs, convert, write its
outputs. Memory holds one step, or as many as fit into the size of the two largest tensors: they are hashed while the
next steps are read."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megarlhf.checkpoint import checksums
from megarlhf.config import UserError
from megarlhf.convert import archives, certificate, exports, huggingface, registry, sources, spm, torch_dist
from megarlhf.convert.certificate import Hashes
from megarlhf.convert.registry import Step
from megarlhf.convert.sources import Source
from megarlhf.convert.storage import Reader, Spec, Writer, completed, read_together
from megarlhf.convert.workers import Workers
from megarlhf.models.spec import Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """Options of the command line beside source and target; None takes the source's value."""

    dtype: str | None = None
    role: str | None = None  # megatron2hf: which model of a checkpoint
    tokenizer: Path | None = None  # nemo2megatron, megatron2megatron: instead of the source's
    vocab_size: int | None = None  # megatron2megatron: where the arguments lack it
    ignore: tuple[str, ...] = ()  # keys of the source's configuration that the user declares harmless


@dataclass(frozen=True)
class Summary:
    target: Path
    tensors: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e9:.2f} GB in {self.seconds:.1f} s ({self.nbytes / 1e9 / self.seconds:.2f} GB/s)"
        return "\n".join([f"{self.target}: {self.tensors} tensors, {size}", *self.notes])


def hf2megatron(source: Path, target: Path, options: Options = Options(), workers: Workers | None = None) -> Summary:
    """A Hugging Face model directory -> a checkpoint directory with actor/ (or reward/) and tokenizer/."""
    return to_ours("hf2megatron", source, target, options, workers)


def to_ours(
    command: str, source: Path, target: Path, options: Options = Options(), workers: Workers | None = None
) -> Summary:
    """`source` -> a checkpoint directory with actor/ (or reward/ for a reward model or critic) and tokenizer/."""
    start, workers = time.perf_counter(), workers or Workers()
    with _opened(command, source, target, options, workers) as opened:
        specs = plan(opened.reader.specs, opened.expected, opened.steps, DTYPES.get(options.dtype), opened.where)
        with _shared(target, workers) as partial:
            role = "reward" if opened.scalar else "actor"
            model = partial / role
            workers.first(model.mkdir)
            writer = torch_dist.Writer(model, specs)
            hashes = transfer(opened.reader, writer, specs, opened.steps, target.name, workers)

            def complete() -> None:
                opened.architecture.save(model)
                _write(model, {**opened.kept})
                _write(partial / "tokenizer", opened.tokenizer)
                _certify(partial, command, options, opened.reader, opened.ignored, specs, hashes, role)
                checksums.write(partial, {f"{role}/{name}": value for name, value in writer.checksums.items()})

            workers.first(complete)
    notes = () if opened.tokenizer else ("no tokenizer came along; give one in the configuration (tokenizer: PATH)",)
    return _summary(target, specs, start, notes)


def megatron2hf(
    source: Path,
    target: Path,
    options: Options = Options(),
    workers: Workers | None = None,
    *,
    undamaged: bool = False,
) -> Summary:
    """A model, checkpoint or run of megarlhf -> a directory for transformers' from_pretrained. `undamaged`: its files
    were written just now, and their checksums are not compared."""
    start, workers = time.perf_counter(), workers or Workers()
    found: list[tuple[Source, dict[str, Any], tuple[str, ...]]] = []
    workers.together(lambda: found.append(exports.open_model(source, options.role)))
    opened, config, notes = found[0]
    if not undamaged:
        workers.together(lambda: _undamaged(opened.reader.directory, workers))
    specs = plan(opened.reader.specs, opened.expected, opened.steps, DTYPES.get(options.dtype), opened.where)
    config.pop("dtype", None)  # transformers 5 writes `dtype` but reads `torch_dtype` too, 4 only knows the latter
    widest = max((spec.dtype for spec in specs.values()), key=lambda dtype: dtype.itemsize)
    config["torch_dtype"] = str(widest).removeprefix("torch.")
    with _shared(target, workers) as partial:
        writer = huggingface.Writer(partial, specs)
        workers.first(writer.create)
        hashes = transfer(opened.reader, writer, specs, opened.steps, target.name, workers)

        def complete() -> None:
            huggingface.write_json(partial / huggingface.CONFIG, config)
            _write(partial, {**opened.kept, **opened.tokenizer})
            more = spm.keep_if_equal(partial) if isinstance(opened.tokenizer.get("tokenizer.json"), str) else ()
            _certify(partial, "megatron2hf", options, opened.reader, opened.ignored, specs, hashes, "")
            return more

        notes += workers.first(complete) or ()
    return _summary(target, specs, start, notes)


def _undamaged(directory: Path, workers: Workers) -> None:
    """Refuse (UserError) a model whose files differ from their checksums; each process reads its share."""
    if damage := checksums.damage(directory, rank=workers.rank, size=workers.size):
        raise UserError(damage)


def _write(directory: Path, files: dict[str, Path | str]) -> None:
    """Files by name: copied, or with the text given."""
    for name, content in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content.read_bytes())


def verify(source: Path, target: Path, options: Options = Options(), workers: Workers | None = None) -> str:
    """Recompute the certificate of `target` from `source` and from the target's files; UserError names what differs."""
    workers = workers or Workers()
    known = certificate.load(target)
    told = known.get("options", {})
    ignore = tuple(told.get("ignore", ()))
    options = Options(told.get("dtype"), told.get("role"), options.tokenizer, told.get("vocab_size"), ignore)
    certificate.compare_files(target, known.get("files", {}))
    command, model = known["command"], target / known["model"]
    opening: Any = _opened(command, source, target, options, workers)
    if command == "megatron2hf":
        opening = contextlib.nullcontext(exports.open_model(source, options.role)[0])
    with opening as opened:
        specs = plan(opened.reader.specs, opened.expected, opened.steps, DTYPES.get(options.dtype), opened.where)
        read, made = transfer(opened.reader, _Nowhere(), specs, opened.steps, f"verify {target.name}", workers)
        before = certificate.entries(opened.reader.specs, read)
        certificate.compare("source", str(source), known["source"]["tensors"], before)
        if command == "megatron2hf":
            reader: Reader = huggingface.Reader(target)
        else:
            reader = torch_dist.Reader(model, None)
        steps = [Step((name,), (name,), lambda tensors: tensors) for name in reader.specs]
        stored, _ = transfer(reader, _Nowhere(), reader.specs, steps, f"read {target.name}", workers)
        certificate.compare(
            "target", str(target), known["target"]["tensors"], certificate.entries(reader.specs, stored)
        )
        certificate.compare("converted", str(source), known["target"]["tensors"], certificate.entries(specs, made))
    return f"{target}: {len(read)} tensors read and {len(stored)} written are those of {certificate.FILE}"


@contextlib.contextmanager
def _opened(command: str, source: Path, target: Path, options: Options, workers: Workers) -> Iterator[Source]:
    if command == "hf2megatron":
        yield sources.hugging_face(source, options.ignore)
    elif command == "megatron2megatron":
        yield sources.megatron(source, str(source), options.tokenizer, options.vocab_size, options.ignore)
    else:
        unpacking = archives.unpacked(source, target.absolute().parent)
        directory = workers.first(unpacking.__enter__)
        try:
            yield sources.nemo(directory, str(source), options.tokenizer, options.ignore)
        finally:
            if workers.rank == 0:
                unpacking.__exit__(None, None, None)


def plan(
    found: dict[str, Spec], expected: dict[str, Shape], steps: Sequence[Step], dtype: torch.dtype | None, where: str
) -> dict[str, Spec]:
    """The specs of all outputs of `steps`; UserError unless `found` has exactly their inputs."""
    remedy = "the weights are damaged or belong to another configuration"
    for name, shape in expected.items():
        if name not in found:
            more = len(expected.keys() - found.keys()) - 1
            also = f" and {more} more" if more else ""
            raise UserError(f"{where}: tensor '{name}' {list(shape)}{also} is missing; {remedy}")
    for name, spec in found.items():
        if name not in expected:
            raise UserError(f"{where}: tensor '{name}' {list(spec.shape)} has no place in this architecture; {remedy}")
        if spec.shape != expected[name]:
            shapes = f"has shape {list(spec.shape)}, expected {list(expected[name])}"
            raise UserError(f"{where}: tensor '{name}' {shapes}; {remedy}")
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise UserError(f"{where}: tensor '{name}' is {spec.dtype}; quantised weights cannot be converted")
    assert Counter(name for step in steps for name in step.inputs) == Counter(list(expected))
    out: dict[str, Spec] = {}
    for step in steps:
        # the constants of a scalar head are always fp32
        kinds = {found[name].dtype for name in step.inputs if name not in registry.CONSTANTS} or {torch.float32}
        if len(kinds) > 1 and dtype is None:
            raise UserError(f"{where}: {', '.join(step.inputs)} have different dtypes; choose one with --dtype")
        kind = kinds.pop() if dtype is None else dtype
        blank = [torch.empty(found[name].shape, device="meta") for name in step.inputs]
        for name, tensor in zip(step.outputs, step.convert(blank), strict=True):
            assert name not in out, name
            out[name] = Spec(tuple(tensor.shape), torch.float32 if name in registry.CONSTANTS else kind)
    return out


def transfer(
    reader: Reader, writer: Writer, specs: dict[str, Spec], steps: Sequence[Step], title: str, workers: Workers
) -> tuple[Hashes, Hashes]:
    """Run `steps` from `reader` to `writer`, divided over the processes. Returns the hashes of inputs and outputs."""
    mine = _share(writer, specs, steps, workers)
    total = sum(reader.specs[name].nbytes for step in mine for name in step.inputs)
    room = sum(sorted((spec.nbytes for spec in [*reader.specs.values(), *specs.values()]), reverse=True)[:2])
    read: Hashes = {}
    written: Hashes = {}

    def run() -> tuple[Any, Hashes, Hashes]:
        # disable=None: no bar where stderr is not a terminal
        with (
            tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=workers.rank > 0 or None) as bar,
            ThreadPoolExecutor(2) as pool,
        ):
            under_way: deque[tuple[int, list[tuple[Hashes, str, Future[str]]]]] = deque()  # bytes, pending hashes
            try:
                for step in mine:
                    nbytes = sum(reader.specs[name].nbytes for name in step.inputs)
                    whole = nbytes
                    if [reader.specs[name] for name in step.inputs] != [specs[name] for name in step.outputs]:
                        whole += sum(specs[name].nbytes for name in step.outputs)  # else they are the same tensor
                    while under_way and sum(held for held, _ in under_way) + whole > room:
                        _settle(under_way)
                    under_way.append((whole, _run(step, reader, writer, specs, pool, read, written)))
                    bar.update(nbytes)
                    workers.progressed()
                while under_way:
                    _settle(under_way)
            finally:
                done = writer.close()
        return done, read, written

    results = workers.together(run)
    workers.first(lambda: writer.finish([done for done, _, _ in results]))
    return (
        certificate.union([part for _, part, _ in results], (name for step in steps for name in step.inputs), "read"),
        certificate.union([part for _, _, part in results], specs, "written"),
    )


def _share(writer: Writer, specs: dict[str, Spec], steps: Sequence[Step], workers: Workers) -> list[Step]:
    """This process's steps: each of the writer's units goes to the process with the fewest bytes so far."""
    units: dict[Any, list[Step]] = {}
    for step in steps:
        units.setdefault(writer.unit(step.outputs[0]), []).append(step)
    loads, mine = [0] * workers.size, []
    for unit in units.values():
        rank = loads.index(min(loads))
        loads[rank] += sum(specs[name].nbytes for step in unit for name in step.outputs)
        if rank == workers.rank:
            mine += unit
    return mine


def _run(step, reader: Reader, writer: Writer, specs, pool: ThreadPoolExecutor, read: Hashes, written: Hashes):
    """Run one step and start its hashes. After the return only the pending hashes hold its tensors."""
    inputs = read_together(reader, step.inputs)
    outputs = [
        _rounded(name, tensor, specs[name].dtype)
        for name, tensor in zip(step.outputs, step.convert(inputs), strict=True)
    ]
    before = [pool.submit(certificate.sha256, tensor) for tensor in inputs]
    if len(inputs) == len(outputs) == 1 and inputs[0] is outputs[0]:
        after = before
    else:
        after = [pool.submit(certificate.sha256, tensor) for tensor in outputs]
    for name, tensor in zip(step.outputs, outputs, strict=True):
        writer.write(name, tensor)
    return [(read, *entry) for entry in zip(step.inputs, before, strict=True)] + [
        (written, *entry) for entry in zip(step.outputs, after, strict=True)
    ]


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = tensor.to(dtype).contiguous()
    if tensor.dtype != dtype and not out.isfinite().all() and tensor.isfinite().all():
        kind, largest = str(dtype).removeprefix("torch."), tensor.abs().max().item()
        raise UserError(
            f"tensor '{name}' has numbers up to {largest:.3g}, too large for {kind}; choose another --dtype"
        )
    return out


def _settle(under_way: deque) -> None:
    """Wait for the oldest step's hashes."""
    for hashes, name, future in under_way.popleft()[1]:
        hashes[name] = future.result()


class _Nowhere:
    """A writer that writes nothing, for `verify`."""

    def unit(self, name: str) -> str:
        return name

    def write(self, name: str, tensor: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        pass

    def finish(self, written: list[None]) -> None:
        pass


@contextlib.contextmanager
def _shared(target: Path, workers: Workers) -> Iterator[Path]:
    """`completed` for all processes: the first process makes the directory and gives it its name."""
    making = completed(target, workers.progressed)
    partial = workers.first(making.__enter__)
    try:
        yield partial
    except BaseException as error:
        if workers.rank == 0:
            making.__exit__(type(error), error, error.__traceback__)
        raise
    workers.first(lambda: making.__exit__(None, None, None))


def _certify(partial: Path, command: str, options: Options, reader, ignored, specs, hashes, model: str) -> None:
    read, written = hashes
    huggingface.write_json(
        partial / certificate.FILE,
        {
            "version": certificate.VERSION,
            "command": command,
            "options": {
                "dtype": options.dtype,
                "role": options.role,
                "vocab_size": options.vocab_size,
                "ignore": list(options.ignore),
            },
            "model": model,
            "files": certificate.files(partial),
            "source": {"tensors": certificate.entries(reader.specs, read), "ignored": sorted(ignored)},
            "target": {"tensors": certificate.entries(specs, written)},
        },
    )


def _summary(target: Path, specs: dict[str, Spec], start: float, notes: tuple[str, ...]) -> Summary:
    return Summary(target, len(specs), sum(spec.nbytes for spec in specs.values()), time.perf_counter() - start, notes)


COMMANDS: dict[str, Callable[..., Summary]] = {
    "hf2megatron": hf2megatron,
    "megatron2hf": megatron2hf,
    "nemo2megatron": lambda *arguments: to_ours("nemo2megatron", *arguments),
    "megatron2megatron": lambda *arguments: to_ours("megatron2megatron", *arguments),
}
