"""Lightning: the strategies for Trainer and Fabric, and what they need of both."""
