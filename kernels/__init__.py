"""Triton kernels and their plain-torch twins, importable only as ``fusedcomp.kernels``."""

if __name__ != "fusedcomp.kernels":
    raise ImportError("this folder is the package `fusedcomp.kernels`; install with `pip install -e .`")
