"""What the kernel families share."""
