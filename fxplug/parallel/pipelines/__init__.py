"""A denoiser on patches of its tokens over time: PipeFusion's stages and stale gathers."""
