"""Plain-torch twins: specification, test oracle, eager baseline, and the path CPU tensors take."""
