"""Models, their weights and their example inputs, from a configuration."""
