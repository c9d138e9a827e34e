"""A model as a file that runs without this package: ONNX, ``torch.export``, TorchScript, checked where it will run."""
