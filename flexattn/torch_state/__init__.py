"""PyTorch's state around a call: modes, torch.func transforms, tensor subclasses, torch.compile."""
