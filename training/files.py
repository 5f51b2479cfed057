"""Small files that are whole or not there."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's content in one step: a crash leaves the old content or the new."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
