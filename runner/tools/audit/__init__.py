"""Hooks that follow somebody else's training loop, and what they find."""
