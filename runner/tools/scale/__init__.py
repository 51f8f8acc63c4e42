"""How far a recipe scales: up to which batch size, and by which rule, training stays the same."""
