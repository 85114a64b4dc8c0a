"""Which processes train together, where they run, and how they are started. Imports no TensorFlow."""
