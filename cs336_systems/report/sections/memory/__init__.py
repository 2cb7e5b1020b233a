"""Tables, sentences and pictures of what the memory of a step held."""
