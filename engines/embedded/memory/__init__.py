"""Where tensors of the embedded engine live, and how bytes are copied there."""
