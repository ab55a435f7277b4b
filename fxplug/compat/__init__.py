"""Plugins and configurations written for other systems, used in graphs without a change to their classes."""
