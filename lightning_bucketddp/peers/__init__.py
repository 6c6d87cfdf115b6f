"""What ranks know of one another: agreement through the store, failures, the control vector, the abort listener."""
