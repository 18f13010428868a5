"""Stands for a package that is not installed."""

raise ImportError("No module named 'prompt_toolkit'")
