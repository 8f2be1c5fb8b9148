"""Single batches live and predicted, and which (model, backend) is fastest where."""
