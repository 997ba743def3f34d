"""The releases of vLLM that kvant was run with. Another release is refused at the start, because
vLLM's interface for attention is not stable: code for another release may read wrong rows."""

from __future__ import annotations

from typing import Any

# bench/results/vllm_versions.csv says what was run with each of them.
TESTED = ("0.31", "0.32", "0.33")


def refusal(version: str) -> str | None:
    """Why kvant does not work with this release of vLLM, in one line. None if it does."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return None
    return (
        f"kvant: vLLM {version} was not tested, only {', '.join(TESTED)}: install one of them (pip "
        f'install "vllm=={TESTED[-1]}.*"), or start without KVANT_VLLM and --attention-backend '
        "KVANT"
    )


def __getattr__(name: str) -> Any:
    """With a release that was not tested, this module's Backend is the backend KVANT. vLLM looks
    for it when a user asks for KVANT, and raises this error."""
    import vllm

    words = refusal(vllm.__version__)
    if name != "Backend" or words is None:
        raise AttributeError(name)
    raise RuntimeError(words)
