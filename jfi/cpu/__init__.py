"""CPU implementations, where the plain formula would be slow or use too much memory."""
