"""Knowledge of the other ranks: agreement through the store, failures, the control vector, the abort listener."""
