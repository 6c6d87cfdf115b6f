"""Entry point of ``python -m lightning_bucketddp``."""

import sys

from lightning_bucketddp.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
