"""torch.compile: guards, partitioners, backends and graph passes of planned models.

:mod:`~bitplan.compiler.backends` has the backends of torch.compile.
:mod:`~bitplan.compiler.partitioning` decides which tensors a graph saves for its backward pass,
:mod:`~bitplan.compiler.tracing` what is guarded, and the other modules fuse and launch our kernels. Only
:mod:`~bitplan.compiler.torch_private` imports private torch.
"""
