"""Methods of quantisation as functions of tensors: none knows a model, a file or a tier."""
