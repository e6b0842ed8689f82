"""flexattn inside graphs: the operators that torch.compile, torch.export and fake tensors see."""
