"""Lightning: the strategies for Trainer and Fabric, and their parts."""
