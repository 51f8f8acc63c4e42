"""Two setups replayed step by step, side by side: are they the same training, and if not, where do they part?"""
