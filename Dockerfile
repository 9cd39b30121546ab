# NVIDIA's image brings CUDA, NCCL, PyTorch 2.10, Transformer Engine and apex, built to fit one another. Those stay: pip
# is held to the torch, triton and numpy that it finds. The image's own PIP_CONSTRAINT would hold every package, also
# those of which transformers needs newer ones. The host's driver must be of branch 580 or newer (CUDA 13.1).
# docs/gpu.md lists what a dry run of pip has shown of this, and what it could not.
# The last command fails the build where megatron does not import; there is no GPU then, so it says nothing of one.
FROM nvcr.io/nvidia/pytorch:25.12-py3

WORKDIR /opt/megarlhf
COPY . .
RUN pip list --format=freeze | grep -E '^(torch|triton|pytorch-triton|numpy)==' >/tmp/pins.txt \
 && grep '^megatron-core==' constraints.txt >>/tmp/pins.txt \
 && PIP_CONSTRAINT= pip install --no-cache-dir -c /tmp/pins.txt -e . \
 && python -c 'from megarlhf.cluster import backend; backend.install()'
