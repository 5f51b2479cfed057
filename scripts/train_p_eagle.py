"""Trains a P-EAGLE head: a run's settings are a TOML file.

python scripts/train_p_eagle.py --config configs/smollm2_p_eagle.toml
"""

import sys

import tyro
from train_eagle3 import Options, TrainingStopped, main

if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description="Train a P-EAGLE head."), recipe="p_eagle")
    except (OSError, ValueError, TrainingStopped) as error:
        sys.exit(f"error: {error}")
