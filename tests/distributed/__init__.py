"""Tests on real ranks. Their modules import megatron, which on CPU needs the backend first."""

from megarlhf.cluster import backend

backend.install()
