"""The runner: a declarative recipe runner for fine-tuning."""

__version__ = "0.1.0"
