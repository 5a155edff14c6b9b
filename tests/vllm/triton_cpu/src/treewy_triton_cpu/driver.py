"""The driver half of the backend: found by Triton as the one subclass of DriverBase in this module."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends import compiler, driver


class InterpretedDriver(driver.DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return compiler.GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        def once(run: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
            run()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return once
