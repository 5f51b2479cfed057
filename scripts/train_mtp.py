"""Trains an MTP module for a frozen target: a run's settings are a TOML file.

python scripts/train_mtp.py --config configs/smollm2_mtp.toml
"""

import sys

import tyro
from train_eagle3 import Options, TrainingStopped, main

if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description="Train an MTP module."), recipe="mtp")
    except (OSError, ValueError, TrainingStopped) as error:
        sys.exit(f"error: {error}")
