"""Devices that are not there, for lowering: from 0.11 on JAX wants to know the GPU that it lowers for."""

from __future__ import annotations

from jax.sharding import AbstractDevice, AbstractMesh

H100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
ABSENT = {"cuda": H100, "tpu": AbstractMesh((), ())}  # by platform
