"""Tables, sentences and pictures of where the memory of training steps went."""
