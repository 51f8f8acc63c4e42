"""What a slow link costs, on a real one: two workers in network namespaces of their own, joined at a set rate."""
