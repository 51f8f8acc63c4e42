"""Many runs by one command: which there are, how far they have got, and what they came to."""
