"""A GPU: limits of the machine, the memory saver, and pushes of models in real shapes."""
