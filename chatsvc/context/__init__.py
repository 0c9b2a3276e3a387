"""What the model is shown. Pure: records in, records out."""
