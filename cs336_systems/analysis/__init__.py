"""What the profiles say: readers of files, and what is computed from them."""
