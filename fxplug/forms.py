"""Which form a layer with a low-rank update takes: by measurements, else by a stated rule."""
