"""`measure=true`: some real optimizer steps of a setup, and what whole runs will need according to them."""
