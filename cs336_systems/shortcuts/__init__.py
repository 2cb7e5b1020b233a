"""What makes a step faster and leaves what it computes as it is; fast.py chooses among them."""
