"""SiTU-GLU; see README.md."""

from kernels.situ_glu.op import situ_glu, situ_glu_grads

__all__ = ["situ_glu", "situ_glu_grads"]
