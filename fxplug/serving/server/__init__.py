"""The engine behind HTTP: `fxplug serve`."""
