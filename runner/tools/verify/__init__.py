"""Replay two setups step by step: are they the same training, and if not, where do they differ first?"""
