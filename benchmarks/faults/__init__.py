"""Injected faults: runs that are killed, signalled and cut off, and what is left of them afterwards."""
