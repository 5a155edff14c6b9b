"""Where numbers come from: machine, versions, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import treewy


def provenance(*packages: str) -> dict[str, Any]:
    """Date, machine and versions, these installed packages' included."""
    versions = {"treewy": treewy.__version__, "commit": commit(), "python": platform.python_version()}
    versions["torch"] = torch.__version__
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"gpu": gpu(), "driver": driver(), "cpu": cpu(), "cores": os.cpu_count() or 1},
        "versions": versions,
    }


def gpu() -> str | None:
    """Name of the CUDA device; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def driver() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip().partition("\n")[0] or None


def cpu() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the source's commit; `unknown` for an installed package."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
