"""The compiler half of the backend: found by Triton as the one subclass of BaseBackend in this module."""

from typing import Any, NoReturn

from triton.backends import compiler


class InterpretedBackend(compiler.BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> Any:
        return options

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> NoReturn:
        raise RuntimeError("this backend compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
