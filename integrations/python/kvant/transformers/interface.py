"""Some models choose their attention from a fixed table of classes, which has no entry for kvant's.
Without this file loading them ends with KeyError: 'kvant'."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import PreTrainedModel


def _tables(model: Any) -> list[dict[str, Any]]:
    names = vars(sys.modules.get(type(model).__module__, sys))
    return [
        x for name, x in names.items() if name.endswith("ATTENTION_CLASSES") and isinstance(x, dict)
    ]


def refuse_tables() -> None:
    """From now on such a model is refused with a clear message when it is made with
    attn_implementation="kvant"."""
    chosen_by = PreTrainedModel.get_correct_attn_implementation
    if hasattr(chosen_by, "__wrapped__"):
        return

    @functools.wraps(chosen_by)
    def checked(self: Any, *arguments: Any, **options: Any) -> str:
        chosen = chosen_by(self, *arguments, **options)
        if chosen.startswith("kvant") and any(chosen not in table for table in _tables(self)):
            raise ValueError(
                f'attn_implementation="kvant": {type(self).__name__} computes only its '
                "own attention; load it with "
                'attn_implementation="eager", with which a KvantCache works, too'
            )
        return chosen

    PreTrainedModel.get_correct_attn_implementation = checked


refuse_tables()
