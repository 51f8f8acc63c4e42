"""Which scaling rule keeps the metric at which batch size?"""
