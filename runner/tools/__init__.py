"""Commands that look at runs or setups. Nothing that trains imports them."""
