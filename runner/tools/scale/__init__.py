"""The scaling of a recipe: up to which batch size, and by which rule, training stays the same."""
