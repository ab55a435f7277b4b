"""Triton kernels as torch.library operators, with fake and CPU implementations."""
