"""All that exists only so that CPU ranks run, and run fast. A rank on a GPU imports nothing of this folder.

`megatron.py` makes megatron-core run without CUDA, over `stand_ins.py`; `operations.py` has what Transformer Engine and
apex fuse on a GPU; `collectives.py` and `shared_memory.py` replace collectives that gloo makes slow; `memory.py` steers
malloc; `lean_imports.py` keeps Triton and torch's compiler out of the process.

Other folders import from here only inside functions, and only where `backend.on_cuda()` is False or a tensor is on the
CPU. Nothing here imports the rest of megarlhf.
"""
