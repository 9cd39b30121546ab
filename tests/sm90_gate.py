"""Compiles the Triton kernels for sm_90, which needs no GPU and no driver, and prints as JSON what each came to.

A process of its own: TRITON_INTERPRET must not be set. `python -m tests.sm90_gate [decode]`
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarlhf.kernels import triton_decode as decode
from megarlhf.kernels import triton_rows as rows

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"

# Arguments of the models' precision, and int64; other pointers are float32.
DATA = ("X", "REF", "OUT", "Q", "K", "V", "KEYS", "VALUES", "BIAS", "RESIDUAL", "WEIGHT", "SHIFT", "NORMED")
INDICES = ("LABELS", "IDS", "STEPS", "ROWS", "POSITIONS", "FOUND", "LEAST", "COUNTS")


def measure(kernel, logits: str, entropy: bool, block: int, warps: int, **constants) -> dict:
    """Registers, stack and local bytes of one variant, spills, and instructions an element of its inner loop."""
    types = dict.fromkeys(DATA, f"*{logits}") | dict.fromkeys(("scale", "epsilon"), "fp32")
    types |= dict.fromkeys(INDICES, "*i64") | dict.fromkeys(("seed_low", "seed_high"), "i64")
    constants = constants or {"ENTROPY": entropy, "BLOCK": block}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def type_of(name: str) -> str:
        return "constexpr" if name in constants else types.get(name, "*fp32" if name.isupper() else "i32")

    names = kernel.arg_names
    aligned = [i for i, name in enumerate(names) if type_of(name).startswith("*") or name.startswith("stride")]
    source = ASTSource(
        fn=kernel, signature={name: type_of(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([BIN / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;/]*);", sass)]
    jumps = [(at, re.search(r"BRA.*?0x([0-9a-f]+)$", text)) for at, text in code]
    loops = [
        sum(int(jump[1], 16) <= at <= end for at, _ in code) for end, jump in jumps if jump and int(jump[1], 16) < end
    ]
    return {
        "registers": registers, "shared": compiled.metadata.shared, "stack": stack, "local": local,
        "spills": sum("LDL" in text or "STL" in text for _, text in code),
        "per_element": max(loops) / (block / (warps * 32)) if loops else None,
    }  # fmt: skip


def main() -> None:
    shapes = {
        rows.logprob_stats_kernel: (rows.STATS_BLOCK, rows.STATS_WARPS),
        rows.logprob_grad_kernel: (rows.GRAD_BLOCK, rows.GRAD_WARPS),
        rows.kl_stats_kernel: (rows.KL_BLOCK, rows.KL_WARPS),
        rows.kl_grad_kernel: (rows.GRAD_BLOCK, rows.GRAD_WARPS),
    }
    print(json.dumps({
        f"{kernel.__name__} {logits}{' entropy' * entropy}": measure(kernel, logits, entropy, *shape)
        for kernel, shape in shapes.items() for logits in ("bf16", "fp32") for entropy in (False, True)
        if "ENTROPY" in kernel.arg_names or (not entropy and (kernel != rows.kl_stats_kernel or logits == "bf16"))
    }))  # fmt: skip


def main_decode() -> None:
    """The shapes of Llama 7B and 70B, and what they leave out."""
    found = {}
    for kind, size in (("bf16", 2), ("fp32", 4)):

        def add(name: str, kernel, warps: int, kind=kind, **constants) -> None:
            found[f"{name} {kind}"] = measure(kernel, kind, False, 1, warps, **constants)

        half = kind == "bf16"
        for heads, channels, turn in ((8, 128, 128), (1, 80, 20), (71, 64, 64)) if half else ((8, 128, 128),):
            lanes = {
                "LANES": channels, "HALF_LANES": turn // 2, "REST_LANES": max(channels - turn, 1), "HEADS": heads
            }  # fmt: skip
            add(f"rotate {heads} x {channels}, {turn} turn", decode.rotate_and_store_kernel,
                decode.rotate_warps(heads, turn // 2), HALF=turn // 2, SIZE=channels,
                **{name: triton.next_power_of_2(value) for name, value in lanes.items()})  # fmt: skip
        shapes = [(1, 64, 1), (8, 80, 8), (8, 128, 1), (8, 128, 8), (71, 64, 8), (8, 256, 8)]
        for heads, channels, splits in shapes if half else shapes[3:]:
            lanes = triton.next_power_of_2(channels)
            add(f"attend {heads} x {channels}, {splits} parts", decode.attend_kernel,
                decode.attend_warps(heads, lanes), SIZE=channels, LANES=lanes, HEADS=decode.rows_for(heads),
                BLOCK=decode.BLOCKS[size], SPLITS=splits, STAGES=decode.ATTEND_STAGES)  # fmt: skip
        add("join", decode.join_kernel, 4, SIZE=128, LANES=128, SPLITS=decode.MOST_PARTS)
        for lanes in (4096, 16384) if half else (16384,):
            for rms in (True, False):
                add(f"{'RMS' if rms else 'layer'} norm of {lanes}", decode.add_norm_kernel, decode.norm_warps(lanes),
                    HAS_BIAS=not rms, RMS=rms, CENTRED=rms, LANES=lanes)  # fmt: skip
        for name in ("silu", "gelu") if half else ():
            add(name, decode.activate_kernel, decode.ACTIVATE_WARPS, ACTIVATION=name, GATED=True, HAS_BIAS=True,
                ROUNDS=name == "gelu", BLOCK=decode.ACTIVATE_BLOCK)  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main_decode() if sys.argv[1:] == ["decode"] else main()
