"""The published experiment of 2022 and 2023: its tables, and its times predicted from a few of them."""
