"""``Trainer(strategy="bucketdp")``: several devices in one process."""
