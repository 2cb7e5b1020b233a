"""What makes a step faster and leaves what it computes as it is; fast.py chooses among all but fp8, which rounds."""
