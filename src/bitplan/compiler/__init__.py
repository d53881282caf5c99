"""torch.compile: guards, partitioners, backends and graph passes of planned models.

:mod:`~bitplan.compiler.tracing` and :mod:`~bitplan.compiler.compiling` hold the settings of torch.compile itself,
:mod:`~bitplan.compiler.partitioning`, :mod:`~bitplan.compiler.packed_backend` and
:mod:`~bitplan.compiler.native_backend` decide which tensors a graph saves for its backward pass, and the other modules
fuse and launch our kernels. Private torch is imported by :mod:`~bitplan.compiler.torch_private` alone.
"""
