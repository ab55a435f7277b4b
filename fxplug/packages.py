"""AOTInductor packages: a module compiled ahead of time, whose adapters stay live."""
