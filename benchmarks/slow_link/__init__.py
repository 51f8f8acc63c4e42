"""The cost of a slow link: two workers in separate network namespaces, connected at a given rate."""
