"""Samples, and the layer-local fit of kernels to what attention does on them."""
