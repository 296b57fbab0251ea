"""Pure tensor maths: tensors in, tensors out. Knows no config, clock, device choice, file or log."""
