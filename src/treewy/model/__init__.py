"""The small trained model that ships with the package."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent
"""Folder with the model in Hugging Face's layout; ``from_pretrained`` reads it."""
