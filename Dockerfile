# NVIDIA's image brings CUDA, NCCL, PyTorch 2.10, Transformer Engine and apex, built to fit one another. Its torch
# stays: pip is held to the version it finds, and the image's own PIP_CONSTRAINT holds the rest.
FROM nvcr.io/nvidia/pytorch:25.12-py3

WORKDIR /opt/megarlhf
COPY . .
RUN python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >/tmp/pins.txt \
 && grep -E '^(megatron-core|transformers)==' constraints.txt >>/tmp/pins.txt \
 && pip install --no-cache-dir -c /tmp/pins.txt -e .
