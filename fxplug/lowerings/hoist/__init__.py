"""Hoisting: what does not depend on a denoiser's latents is computed once, and kept as long as it is the same to the bit."""
