"""The tracer: one run of a model's own `forward` written down as a graph, and modules and modes left as they were."""
